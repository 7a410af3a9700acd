"""The `multigrad demo` command: start one process per backend, and compare their measurements."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from multigrad.cli.demo.report import Measurements, find_problems, print_table
from multigrad.frameworks import DIFFERENTIATING, how_to_add, is_installed
from multigrad.processes import run_on


def demo(backend: str | None = None) -> int:
    """Run the demo and print a table of the results.

    ```python
    from multigrad.cli.demo.command import demo

    status = demo("jax")
    ```

    Arguments:
        backend: the only backend to run. The default is all installed backends.

    Returns:
        The exit status: 0 if every backend has the expected results, else 1.
    """
    missing = [name for name in DIFFERENTIATING if not is_installed(name)]
    chosen = [backend] if backend else [name for name in DIFFERENTIATING if name not in missing]
    problem = _missing_requirement(chosen, missing)
    if problem:
        print(f"multigrad demo: {problem}", file=sys.stderr)
        return 1
    measured: dict[str, Measurements] = {}
    problems = []
    for name in chosen:
        try:
            measured[name] = measure(name)
        except subprocess.CalledProcessError as error:
            problems.append(f"{name}: the process failed with exit status {error.returncode}")
    if measured:
        print_table(measured)
        problems += find_problems(measured)
    for problem in problems:
        print(f"WRONG  {problem}")
    if not problems:
        print(f"All results are as expected on {', '.join(chosen)}.")
    if missing:
        print(f"Not installed: {_install_commands(missing)}")
    return 1 if problems else 0


def _missing_requirement(chosen: Sequence[str], missing: Sequence[str]) -> str | None:
    """Return why the demo cannot run, and how to fix it. Return None if it can."""
    if not chosen:
        return f"no backend is installed. Install one: {_install_commands(missing)}"
    not_installed = [name for name in chosen if name in missing]
    if not_installed:
        return f"the backend is not installed: {_install_commands(not_installed)}"
    if find_spec("sklearn") is None:
        return "scikit-learn, which contains the digits data set, is not installed: pip install scikit-learn"
    return None


def _install_commands(backends: Sequence[str]) -> str:
    return ", ".join(f"{name} ({how_to_add(name)})" for name in backends)


def measure(backend: str) -> Measurements:
    """Run the experiments on a backend in a new process. Its output is shown.

    Raises:
        subprocess.CalledProcessError: if the process fails.
    """
    print(f"{backend}: starting", flush=True)
    with TemporaryDirectory() as folder:
        result = Path(folder, "measurements.json")
        run_on(backend, __package__, str(result)).check_returncode()
        measurements: Measurements = json.loads(result.read_text())
    return measurements
