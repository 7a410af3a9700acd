"""Run the same custom gradients on each installed backend, and compare the results.

    python examples/demo        # every installed backend
    python examples/demo jax

Each backend runs in its own process, because Keras has one backend per process. The exit status is 1 if a
result is wrong.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from report import Measurements, find_problems, print_table

from multigrad.common.frameworks import DIFFERENTIATING, is_installed


def main() -> int:
    """Run the demo, print a table of the results, and return the exit status."""
    measured = {name: measure(name) for name in sys.argv[1:] or filter(is_installed, DIFFERENTIATING)}
    print_table(measured)
    problems = find_problems(measured)
    for problem in problems:
        print(f"WRONG  {problem}")
    if not problems:
        print(f"All results are as expected on {', '.join(measured)}.")
    return 1 if problems else 0


def measure(backend: str) -> Measurements:
    """Run the experiments on a backend in a new process. Its output is shown."""
    print(f"{backend}: starting", flush=True)
    # Hide TensorFlow's log messages about the instruction set of the processor.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    environment = quiet | os.environ | {"KERAS_BACKEND": backend}
    with TemporaryDirectory() as folder:
        result = Path(folder, "measurements.json")
        command = [sys.executable, Path(__file__).with_name("experiments.py"), result]
        subprocess.run(command, env=environment, check=True)
        measurements: Measurements = json.loads(result.read_text())
    return measurements


if __name__ == "__main__":
    sys.exit(main())
