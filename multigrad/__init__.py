"""Custom gradients for Keras 3: one definition that works on TensorFlow, JAX and PyTorch.

Names are imported on first use, so that `import multigrad` imports neither Keras nor a framework. After
`import keras`, it registers the ops and layers, so that Keras can load models that contain them. The names
that Keras for R has for `keras.ops`, such as `op_exp`, can be imported from here too (see
`multigrad.r_names`). They are not listed by `dir(multigrad)`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigrad.calculus.derivatives import grad, hessian, jacobian, jvp, value_and_grad, vjp
    from multigrad.calculus.mapping import vmap
    from multigrad.compilation import jit
    from multigrad.op import op_custom_gradient
    from multigrad.tracing.context import trace_gradients

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "grad",
    "hessian",
    "jacobian",
    "jit",
    "jvp",
    "op_custom_gradient",
    "trace_gradients",
    "value_and_grad",
    "vjp",
    "vmap",
]

_DERIVATIVES = ("grad", "hessian", "jacobian", "jvp", "value_and_grad", "vjp")
_MODULES = dict.fromkeys(_DERIVATIVES, "multigrad.calculus.derivatives") | {
    "jit": "multigrad.compilation",
    "op_custom_gradient": "multigrad.op",
    "trace_gradients": "multigrad.tracing.context",
    "vmap": "multigrad.calculus.mapping",
}

_SUBMODULES = ("callbacks", "layers", "ops", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _SUBMODULES or name.startswith("op_"):
        importlib.import_module("multigrad.backend")  # checks the environment before Keras is imported
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"multigrad.{name}")
    elif name.startswith("op_"):
        value = importlib.import_module("multigrad.r_names").find_op(name)
    else:
        value = None
    errors = importlib.import_module("multigrad.common.errors")
    if value is None:
        text = f"module 'multigrad' has no attribute {name!r}"
        raise AttributeError(text + errors.did_you_mean(name, __dir__()))
    globals()[name] = value
    errors.hide_frames()
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})


if sys.modules.get("keras") is not None:
    __getattr__("layers")
