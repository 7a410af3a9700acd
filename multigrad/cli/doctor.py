"""`multigrad doctor`: print the versions, the installed backends and the active backend, without imports."""

import platform

import multigrad
from multigrad.common.frameworks import (
    DIFFERENTIATING,
    FORWARD_ONLY,
    SUPPORTED,
    active_backend,
    how_to_add,
    is_importable,
    is_installed,
    oldest_supported,
    other_distribution,
    version_of,
    version_problem,
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
        The exit status: 0, or 1 if multigrad cannot run on the active backend.
    """
    _print_row("Python", platform.python_version())
    _print_row("multigrad", multigrad.__version__)
    backend, origin = active_backend()
    keras = version_of("keras") if is_importable("keras") else f"missing: {_INSTALL_KERAS}"
    _print_row("Keras", keras + _support_text("keras", backend))
    print()
    for name in _BACKENDS:
        if is_installed(name):
            status = version_of(name)
        else:
            found = f"{version_of(name)}, incomplete" if is_importable(name) else "missing"
            status = f"{found}: {how_to_add(name)}"
        _print_row(name, status + _support_text(name, backend))
    print()
    _print_row("active", f"{backend}, from {origin}")
    problems = [problem for problem in (_find_problem(backend), other_distribution()) if problem]
    for problem in problems:
        _print_row("", problem.replace("\n", "\n" + " " * 12))
    return 1 if problems else 0


def _support_text(name: str, backend: str) -> str:
    """Return the end of a row: the supported versions, or that a backend has no gradients."""
    if name in FORWARD_ONLY:
        return "; forward only, no gradients"
    return f"; supported: {oldest_supported(name, backend)} or newer, tested up to {SUPPORTED[name].newest}"


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
    for module in ("keras", backend):
        if module in SUPPORTED:
            problem = version_problem(module, version_of(module), backend)
            if problem:
                return problem
    return None
