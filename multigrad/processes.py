"""A process for a backend: Keras runs on one backend per process."""

import os
import subprocess
import sys

# TensorFlow's notices about the processor's instructions would bury what a process has to say.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}


def run_on(backend: str, module: str, *words: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a module in a fresh process on this backend.

    ```python
    from multigrad.processes import run_on

    done = run_on("jax", "multigrad", "doctor", capture=True)
    ```

    Arguments:
        backend: what Keras is to run on.
        module, words: the module, as after `python -m`, and its arguments.
        capture: whether its output is kept in what is returned. If not, it goes where ours goes.

    Returns:
        The process, which has ended, with any status.
    """
    environment = _QUIET | os.environ | {"KERAS_BACKEND": backend}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, capture_output=capture, text=True, check=False)
