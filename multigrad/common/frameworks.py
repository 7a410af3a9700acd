"""The backends of Keras: which of them are installed and active, and which versions multigrad supports.

This module imports no framework, so that `multigrad doctor` and the tests can inspect an environment.
"""

import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from multigrad.common.errors import message

DIFFERENTIATING = ("tensorflow", "jax", "torch")
"""The backends that compute gradients."""

FORWARD_ONLY = ("numpy", "openvino")
"""The backends of Keras (3.15) that run a forward pass only. So do backends that are not listed here."""


class Versions(NamedTuple):
    """The versions of Keras or a framework that multigrad supports."""

    title: str
    oldest: str
    """The oldest version that works. An older one raises an error on import."""
    newest: str
    """The newest version that the tests have run on. A newer one is expected to work."""


SUPPORTED = {
    "keras": Versions("Keras", "3.12", "3.15"),
    "tensorflow": Versions("TensorFlow", "2.17", "2.21"),
    "jax": Versions("JAX", "0.7", "0.12"),
    "torch": Versions("PyTorch", "2.12", "2.15"),
}
"""The supported versions. Tests compare them with pyproject.toml, noxfile.py and docs/getting-started."""

KERAS_FOR = {"torch": "3.15"}
"""The oldest Keras on a backend that needs a newer one: Keras 3.12 to 3.14 have faults on PyTorch."""

DISTRIBUTION = "keras-multigrad"
"""The name under which pip knows this package."""

# The modules that these backends of Keras (3.15) import.
_MODULES = {"numpy": ("numpy", "jax"), "openvino": ("openvino", "scipy")}


def is_installed(backend: str) -> bool:
    """Return whether all modules that a backend of Keras imports are installed.

    ```python
    from multigrad.common.frameworks import DIFFERENTIATING, is_installed

    print([backend for backend in DIFFERENTIATING if is_installed(backend)])
    ```
    """
    return all(is_importable(module) for module in _modules(backend))


def is_importable(module: str) -> bool:
    """Return whether a module can be imported.

    ```python
    from multigrad.common.frameworks import is_importable

    print(is_importable("keras"))  # True
    ```
    """
    spec = importlib.util.find_spec(module)
    # A folder that remains after uninstalling is a namespace package. It has no origin.
    return spec is not None and spec.origin is not None


def version_of(module: str) -> str:
    """Return the version of the distribution of a module, and its name if that differs from the module.

    ```python
    from multigrad.common.frameworks import version_of

    print(version_of("keras"))  # such as 3.15.1
    print(version_of("tensorflow"))  # such as 2.21.0 (tensorflow-cpu)
    ```
    """
    distributions = sorted(set(metadata.packages_distributions().get(module, ())))
    versions = [_version(distribution, module) for distribution in distributions]
    return " and ".join(versions) or "version unknown"


def _version(distribution: str, module: str) -> str:
    name = distribution.replace("_", "-")
    version = metadata.version(distribution)
    return version if name == module else f"{version} ({name})"


def how_to_add(backend: str) -> str:
    """Return the command that installs the missing modules of a backend."""
    if backend in DIFFERENTIATING:
        return f"pip install {backend}"
    return f"pip install {' '.join(module for module in _modules(backend) if not is_importable(module))}"


def _modules(backend: str) -> tuple[str, ...]:
    return _MODULES.get(backend, (backend,))


def active_backend() -> tuple[str, str]:
    """Return the backend that Keras selects, and the setting that selects it, without importing Keras.

    ```python
    from multigrad.common.frameworks import active_backend

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


def require_active_backend() -> None:
    """Raise if Keras or its active backend is not installed. The error of Keras does not name a fix.

    Raises:
        ModuleNotFoundError: if Keras or the active backend is not installed.
    """
    if "keras" in sys.modules:
        return
    if not is_importable("keras"):
        text = _message("Keras is not installed", required="Keras", got="none", fix="pip install keras")
        raise ModuleNotFoundError(text, name="keras")
    backend, origin = active_backend()
    if backend not in DIFFERENTIATING + FORWARD_ONLY or is_installed(backend):
        return  # Keras raises an error that lists the backends
    others = [name for name in DIFFERENTIATING + FORWARD_ONLY if is_installed(name)]
    choice = (
        f"set the environment variable KERAS_BACKEND={others[0]} before Keras is imported, or "
        if others
        else ""
    )
    text = _message(
        "the active backend of Keras is not installed",
        required=f"{backend}, from {origin}",
        got=f"installed backends: {', '.join(others) or 'none'}",
        fix=f"{choice}{how_to_add(backend)}",
    )
    raise ModuleNotFoundError(text, name=backend)


def require_supported(backend: str) -> None:
    """Check the versions of Keras and of the framework of a backend.

    Raises:
        ImportError: if one of them is older than multigrad supports.
    """
    for module in ("keras", backend):
        if module in SUPPORTED:
            version = importlib.import_module(module).__version__
            problem = version_problem(module, version, backend)
            if problem is not None:
                raise ImportError(problem, name=module)


def version_problem(module: str, version: str, backend: str) -> str | None:
    """Return an error message if a version is older than multigrad supports, else None.

    ```python
    from multigrad.common.frameworks import version_problem

    print(version_problem("torch", "2.9.1", backend="torch"))
    # multigrad: PyTorch 2.9.1 is too old
    #   required: PyTorch 2.12 or newer
    #   got: 2.9.1
    #   fix: pip install --upgrade "torch>=2.12"
    ```
    """
    title, oldest = SUPPORTED[module].title, oldest_supported(module, backend)
    where = f" with {SUPPORTED[backend].title}" if oldest != SUPPORTED[module].oldest else ""
    if is_at_least(version, oldest):
        return None
    return _message(
        f"{title} {version} is too old{where}",
        required=f"{title} {oldest} or newer{where}",
        got=version,
        fix=f'pip install --upgrade "{module}>={oldest}"',
    )


def oldest_supported(module: str, backend: str) -> str:
    """Return the oldest supported version of Keras or a framework on a backend."""
    return KERAS_FOR.get(backend, SUPPORTED[module].oldest) if module == "keras" else SUPPORTED[module].oldest


def is_at_least(version: str, oldest: str) -> bool:
    """Return whether a version is `oldest`, such as 2.12, or newer. An unknown version counts as newer."""
    return not _numbers(version) or _numbers(version) >= _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple([int(number) for number in re.findall(r"\d+", version)[:2]])


def look_up(path: str, otherwise: Callable[[], Any] | None = None) -> Any:
    """Return the object of a framework with this path, or an alternative if there is none.

    Backends look up private names with this function when they are imported. A version without one of the
    names then raises an error on import, instead of losing a gradient later.

    ```python
    from multigrad.common.frameworks import look_up

    look_up("os.path.join")
    look_up("os.path.no_such_name", lambda: None)  # None
    ```

    Arguments:
        path: the name of a module, followed by the names of attributes.
        otherwise: a function that returns the alternative.

    Raises:
        ImportError: if there is no such object and no alternative.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        if otherwise is not None:
            return otherwise()
        module = path.partition(".")[0]
        raise ImportError(_missing_name(module, path), name=module) from error


def _missing_name(module: str, path: str) -> str:
    versions = SUPPORTED.get(module)
    if versions is None:
        return f"{module} has no {path!r}"
    version = importlib.import_module(module).__version__
    return _message(
        f"{versions.title} {version} has no {path!r}, which multigrad needs",
        required=f"{versions.title} {versions.oldest} to {versions.newest}, which the tests have run on",
        got=version,
        fix=f'pip install "{module}=={versions.newest}.*", or a newer {DISTRIBUTION}',
    )


def other_distribution() -> str | None:
    """Return an error message if the distribution `multigrad` of another project is installed, else None.

    Both distributions install a package `multigrad`. The one that was installed last overwrote files of the
    other one.
    """
    try:
        version = metadata.version("multigrad")
    except metadata.PackageNotFoundError:
        return None
    return _message(
        "the distribution of another project is installed, whose package has the same name",
        required=f"only the distribution {DISTRIBUTION}",
        got=f"multigrad {version}, too. Each overwrites files of the other",
        fix=f"pip uninstall multigrad, then pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def _message(problem: str, *, required: str, got: str, fix: str) -> str:
    return message("multigrad", problem, required=required, got=got, fix=fix)
