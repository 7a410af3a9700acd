"""`python -m multigrad demo`: the same custom gradients on each installed backend, side by side.

Keras runs on one backend per process. So each backend gets a process of its own (`__main__`), which runs
the experiments (`experiments`) and hands back what it measured; here the measurements are gathered,
compared with what mathematics expects, and shown (`report`).
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from multigrad.cli.demo.report import Measurements, problems_of, show
from multigrad.frameworks import DIFFERENTIATING, how_to_add, is_installed
from multigrad.processes import run_on


def demo(backend: str | None = None) -> int:
    """Run the demo and print its table.

    ```python
    from multigrad.cli.demo.command import demo

    status = demo("jax")
    ```

    Arguments:
        backend: the only backend to run; each one that is installed by default.

    Returns:
        The exit status: 0 where every backend gave the expected answers, else 1.
    """
    missing = [name for name in DIFFERENTIATING if not is_installed(name)]
    chosen = [backend] if backend else [name for name in DIFFERENTIATING if name not in missing]
    obstacle = _obstacle(chosen, missing)
    if obstacle:
        print(f"multigrad demo: {obstacle}", file=sys.stderr)
        return 1
    measured: dict[str, Measurements] = {}
    problems = []
    for name in chosen:
        try:
            measured[name] = measure(name)
        except subprocess.CalledProcessError as error:
            problems.append(f"{name}: the process of the demo ended with status {error.returncode}")
    if measured:
        show(measured)
        problems += problems_of(measured)
    for problem in problems:
        print(f"WRONG  {problem}")
    if not problems:
        print(f"Every answer is as expected on {', '.join(chosen)}.")
    if missing:
        print(f"Not installed: {_ways_to_add(missing)}")
    return 1 if problems else 0


def _obstacle(chosen: Sequence[str], missing: Sequence[str]) -> str | None:
    """What keeps the demo from running at all."""
    if not chosen:
        return f"no backend is installed. Add one: {_ways_to_add(missing)}"
    absent = [name for name in chosen if name in missing]
    if absent:
        return f"the backend is not installed: {_ways_to_add(absent)}"
    if find_spec("sklearn") is None:
        return "scikit-learn, which brings the handwritten digits, is missing: pip install scikit-learn"
    return None


def _ways_to_add(missing: Sequence[str]) -> str:
    return ", ".join(f"{name} ({how_to_add(name)})" for name in missing)


def measure(backend: str) -> Measurements:
    """Run the experiments on this backend in a fresh process, whose output goes where ours goes.

    Raises:
        subprocess.CalledProcessError: where the process failed; its output has said why.
    """
    print(f"{backend}: starting", flush=True)
    with TemporaryDirectory() as folder:
        answer = Path(folder, "measurements.json")
        run_on(backend, __package__, str(answer)).check_returncode()
        measurements: Measurements = json.loads(answer.read_text())
    return measurements
