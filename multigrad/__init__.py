"""Custom gradients for Keras 3: one definition, the same on TensorFlow, JAX and PyTorch.

The names below are imported when they are first used, so that `python -m multigrad doctor` can look at a
machine without importing a framework. Beside them there are those of Keras for R, such as `op_exp`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigrad.calculus import grad, hessian, jacobian, jvp, value_and_grad, vjp
    from multigrad.custom_gradient import op_custom_gradient
    from multigrad.trace import trace_gradients

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "grad",
    "hessian",
    "jacobian",
    "jvp",
    "op_custom_gradient",
    "trace_gradients",
    "value_and_grad",
    "vjp",
]

_ROOMS = {
    "grad": "calculus",
    "hessian": "calculus",
    "jacobian": "calculus",
    "jvp": "calculus",
    "op_custom_gradient": "custom_gradient",
    "trace_gradients": "trace",
    "value_and_grad": "calculus",
    "vjp": "calculus",
}

_SUBMODULES = ("layers", "ops", "testing")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value = getattr(importlib.import_module(f"multigrad.{_ROOMS[name]}"), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"multigrad.{name}")
    else:
        value = _r_names().look_up(name) if name.startswith("op_") else None
        if value is None:
            raise AttributeError(f"module 'multigrad' has no attribute {name!r}")
    globals()[name] = value
    importlib.import_module("multigrad.errors").hide_frames()
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *_r_names().every()})


def _r_names() -> Any:
    return importlib.import_module("multigrad.r_names")
