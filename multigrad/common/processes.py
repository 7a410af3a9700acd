"""Run a module on a given backend. This takes a new process, because Keras has one backend per process."""

import os
import subprocess
import sys

# Hide TensorFlow's log messages about the instruction set of the processor.
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run_on(backend: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a new process on a backend.

    ```python
    from multigrad.common.processes import run_on

    process = run_on("jax", "multigrad", "doctor")
    ```

    Arguments:
        backend: the backend of Keras in the process.
        module, arguments: the module, as after `python -m`, and its command-line arguments.

    Returns:
        The completed process, with stdout and stderr as text. Its return code is not checked.
    """
    environment = _ENVIRONMENT | os.environ | {"KERAS_BACKEND": backend}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
