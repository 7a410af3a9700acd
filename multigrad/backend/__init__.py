"""The backend of the active framework. Only the module of that framework is imported.

A backend of Keras that multigrad does not know runs the forward pass only, as NumPy and OpenVINO do.
"""

import importlib
import types
import warnings
from typing import TYPE_CHECKING

from multigrad.common.frameworks import (
    DIFFERENTIATING,
    other_distribution,
    require_active_backend,
    require_supported,
)


def _load() -> types.ModuleType:
    require_active_backend()  # before Keras is imported, whose error names neither the backend nor a fix
    name = importlib.import_module("keras").backend.backend()
    require_supported(name)
    other = other_distribution()
    if other is not None:
        warnings.warn(other, RuntimeWarning, stacklevel=2)
    return importlib.import_module(f"{__name__}.{name if name in DIFFERENTIATING else 'forward_only'}")


if TYPE_CHECKING:  # all backends have the same members
    from multigrad.backend import torch as active
else:
    active = _load()
