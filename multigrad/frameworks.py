"""The frameworks that Keras runs on, and which of them are installed: found without importing any."""

import importlib.util
from importlib import metadata

DIFFERENTIATING = ("tensorflow", "jax", "torch")
FORWARD_ONLY = ("numpy", "openvino")

# What Keras's own backends import beside the framework (Keras 3.15).
_MODULES = {"numpy": ("numpy", "jax"), "openvino": ("openvino", "scipy")}


def is_installed(backend: str) -> bool:
    """Whether the modules that a Keras backend needs can be imported.

    ```python
    from multigrad.frameworks import DIFFERENTIATING, is_installed

    print([backend for backend in DIFFERENTIATING if is_installed(backend)])
    ```
    """
    return all(is_importable(module) for module in _modules(backend))


def is_importable(module: str) -> bool:
    """Whether there is such a module to import.

    ```python
    from multigrad.frameworks import is_importable

    print(is_importable("keras"))  # True
    ```
    """
    spec = importlib.util.find_spec(module)
    # A folder that an uninstalled framework left behind is a namespace package, without an origin.
    return spec is not None and spec.origin is not None


def version_of(module: str) -> str:
    """The version of the distribution that a module comes from, named where its name is another.

    ```python
    from multigrad.frameworks import version_of

    print(version_of("keras"))  # such as 3.15.1
    print(version_of("tensorflow"))  # such as 2.21.0 (tensorflow-cpu)
    ```
    """
    names = sorted(set(metadata.packages_distributions().get(module, ())))
    return " and ".join(map(_version, names, [module] * len(names))) or "version unknown"


def _version(distribution: str, module: str) -> str:
    name = distribution.replace("_", "-")
    version = metadata.version(distribution)
    return version if name == module else f"{version} ({name})"


def how_to_add(backend: str) -> str:
    """The command that installs what a backend lacks."""
    if backend in DIFFERENTIATING:
        return f"pip install {backend}"
    return f"pip install {' '.join(m for m in _modules(backend) if not is_importable(m))}"


def _modules(backend: str) -> tuple[str, ...]:
    return _MODULES.get(backend, (backend,))
