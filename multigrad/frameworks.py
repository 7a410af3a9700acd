"""The backends of Keras, and which of them are installed.

This module imports no framework, so that `multigrad doctor` and the tests can inspect an environment.
"""

import importlib.util
from importlib import metadata

DIFFERENTIATING = ("tensorflow", "jax", "torch")
"""The backends that compute gradients."""

FORWARD_ONLY = ("numpy", "openvino")
"""The backends that run a forward pass only."""

# The modules that these backends of Keras (3.15) import.
_MODULES = {"numpy": ("numpy", "jax"), "openvino": ("openvino", "scipy")}


def is_installed(backend: str) -> bool:
    """Return whether all modules that a backend of Keras imports are installed.

    ```python
    from multigrad.frameworks import DIFFERENTIATING, is_installed

    print([backend for backend in DIFFERENTIATING if is_installed(backend)])
    ```
    """
    return all(is_importable(module) for module in _modules(backend))


def is_importable(module: str) -> bool:
    """Return whether a module can be imported.

    ```python
    from multigrad.frameworks import is_importable

    print(is_importable("keras"))  # True
    ```
    """
    spec = importlib.util.find_spec(module)
    # A folder that remains after uninstalling is a namespace package. It has no origin.
    return spec is not None and spec.origin is not None


def version_of(module: str) -> str:
    """Return the version of the distribution that contains a module, with its name if it is not the module's.

    ```python
    from multigrad.frameworks import version_of

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
