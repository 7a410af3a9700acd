"""`python -m multigrad doctor`: what is installed and which backend is active, importing none of it."""

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

_ADD_KERAS = "pip install keras"


def doctor() -> int:
    """Print versions, which backends can be imported, and the active one.

    ```python
    from multigrad.cli.doctor import doctor

    status = doctor()
    ```

    Returns:
        The exit status: 0, or 1 where Keras would not start on the active backend.
    """
    _line("Python", platform.python_version())
    _line("multigrad", multigrad.__version__)
    _line("Keras", version_of("keras") if is_importable("keras") else f"missing: {_ADD_KERAS}")
    print()
    for backend in DIFFERENTIATING + FORWARD_ONLY:
        found = version_of(backend) if is_installed(backend) else f"missing: {how_to_add(backend)}"
        _line(backend, found + ("; forward only, no gradients" if backend in FORWARD_ONLY else ""))
    print()
    backend, origin = active_backend()
    _line("active", f"{backend}, from {origin}")
    problem = _problem_of(backend)
    if problem:
        _line("", problem)
    return 1 if problem else 0


def _line(name: str, text: str) -> None:
    print(f"{name:<12}{text}")


def _problem_of(backend: str) -> str | None:
    """What keeps Keras from starting on the active backend."""
    known = DIFFERENTIATING + FORWARD_ONLY
    if not is_importable("keras"):
        return f"there is no Keras to run on it: {_ADD_KERAS}"
    if backend not in known:
        return f"Keras knows no such backend; set KERAS_BACKEND to one of {', '.join(known)}"
    if not is_installed(backend):
        return f"it is missing: {how_to_add(backend)}, or set KERAS_BACKEND to another"
    return None


def active_backend() -> tuple[str, str]:
    """The backend that Keras will run on, and where that is said: in its own order of precedence.

    ```python
    from multigrad.cli.doctor import active_backend

    backend, origin = active_backend()  # ("jax", "the environment variable KERAS_BACKEND")
    ```
    """
    named = os.environ.get("KERAS_BACKEND")
    if named:
        return named, "the environment variable KERAS_BACKEND"
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
    return default, f"Keras's default, because {path} names none"


def _config_folder() -> Path:
    """Where Keras (3.0 to 3.15 at least) looks for keras.json."""
    if "KERAS_HOME" in os.environ:
        return Path(os.environ["KERAS_HOME"]).expanduser()
    home = Path.home()
    return (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"
