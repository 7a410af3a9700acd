"""`multigrad doctor`: print what is installed and which backend is active, without importing any of it."""

import json
import os
import platform
from pathlib import Path

import multigrad
from multigrad.frameworks import (
    DIFFERENTIATING,
    FORWARD_ONLY,
    how_to_add,
    is_importable,
    is_installed,
    version_of,
)

_BACKENDS = DIFFERENTIATING + FORWARD_ONLY
_INSTALL_KERAS = "pip install keras"


def doctor() -> int:
    """Print versions, the installed backends and the active backend.

    ```python
    from multigrad.cli.doctor import doctor

    status = doctor()
    ```

    Returns:
        The exit status: 0, or 1 if Keras cannot start on the active backend.
    """
    _print_row("Python", platform.python_version())
    _print_row("multigrad", multigrad.__version__)
    _print_row("Keras", version_of("keras") if is_importable("keras") else f"missing: {_INSTALL_KERAS}")
    print()
    for backend in _BACKENDS:
        status = version_of(backend) if is_installed(backend) else f"missing: {how_to_add(backend)}"
        _print_row(backend, status + ("; forward only, no gradients" if backend in FORWARD_ONLY else ""))
    print()
    backend, origin = active_backend()
    _print_row("active", f"{backend}, from {origin}")
    problem = _find_problem(backend)
    if problem:
        _print_row("", problem)
    return 1 if problem else 0


def _print_row(name: str, text: str) -> None:
    print(f"{name:<12}{text}")


def _find_problem(backend: str) -> str | None:
    """Return why Keras cannot start on a backend, and how to fix it. Return None if it can."""
    if not is_importable("keras"):
        return f"Keras is not installed: {_INSTALL_KERAS}"
    if backend not in _BACKENDS:
        return f"Keras has no such backend: set KERAS_BACKEND to one of {', '.join(_BACKENDS)}"
    if not is_installed(backend):
        return f"{backend} is not installed: {how_to_add(backend)}, or set KERAS_BACKEND to another backend"
    return None


def active_backend() -> tuple[str, str]:
    """Return the backend that Keras selects, and the setting that selects it, without importing Keras.

    ```python
    from multigrad.cli.doctor import active_backend

    backend, origin = active_backend()  # ("jax", "the environment variable KERAS_BACKEND")
    ```
    """
    from_environment = os.environ.get("KERAS_BACKEND")
    if from_environment:
        return from_environment, "the environment variable KERAS_BACKEND"
    path = _config_folder() / "keras.json"
    default = "tensorflow"
    if not path.exists():
        return default, "Keras's default"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        return default, f"Keras's default, because {path} is not valid JSON ({error})"
    if "backend" in config:
        return config["backend"], str(path)
    return default, f"Keras's default, because {path} does not set a backend"


def _config_folder() -> Path:
    """Return the folder in which Keras (3.0 to 3.15 at least) looks for keras.json."""
    if "KERAS_HOME" in os.environ:
        return Path(os.environ["KERAS_HOME"]).expanduser()
    home = Path.home()
    return (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"
