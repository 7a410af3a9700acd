"""`keras.ops` with right gradients, and ops with custom gradients.

This module contains every public name of `keras.ops`. A name is the object of `keras.ops`, unless a
derivative of it is wrong or NaN on the active backend: `fixed` contains these ops. Names are looked up on
first use, so that new names of later Keras versions are included. Code that uses `keras.ops` only needs
another import:

```python
import keras
from multigrad import ops

assert ops.exp is keras.ops.exp and ops.nn.relu is keras.ops.nn.relu
```

Each added op is defined in a file of this folder. `custom_gradient` replaces the function of Keras.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from multigrad import backend as _backend  # noqa: F401  checks the environment before Keras is imported

# isort: split
from keras import ops as _keras_ops

from multigrad.common.errors import did_you_mean as _did_you_mean
from multigrad.op import op_custom_gradient
from multigrad.ops.fixed import FIXED as _FIXED
from multigrad.ops.gradient.quantizing import (
    clip_straight_through,
    fake_quantize,
    round_straight_through,
    sign_straight_through,
    straight_through,
)
from multigrad.ops.gradient.routing import (
    clip_gradient,
    prevent_gradient,
    print_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient_if,
)
from multigrad.ops.gradient.spiking import spike
from multigrad.ops.gradient.vector_quantizing import vector_quantize
from multigrad.ops.host_call import host_call
from multigrad.ops.implicit.functions import fixed_point, implicit_argmin, implicit_root, linear_solve
from multigrad.ops.spectral import safe_eigh, safe_svd, spectral_function
from multigrad.ops.stable import log1pexp, logcosh, safe_divide, safe_log, safe_norm, safe_sqrt
from multigrad.ops.vocabulary.linear_cross_entropy import linear_cross_entropy

if TYPE_CHECKING:
    from keras.ops import *  # noqa: F403  for completion and type checkers

custom_gradient = op_custom_gradient

__all__ = [
    "clip_gradient",
    "clip_straight_through",
    "custom_gradient",
    "fake_quantize",
    "fixed_point",
    "host_call",
    "implicit_argmin",
    "implicit_root",
    "linear_cross_entropy",
    "linear_solve",
    "log1pexp",
    "logcosh",
    "prevent_gradient",
    "print_gradient",
    "reverse_gradient",
    "round_straight_through",
    "safe_divide",
    "safe_eigh",
    "safe_log",
    "safe_norm",
    "safe_sqrt",
    "safe_svd",
    "scale_gradient",
    "sign_straight_through",
    "spectral_function",
    "spike",
    "stop_gradient_if",
    "straight_through",
    "vector_quantize",
]


def _keras_names() -> list[str]:
    return [name for name in dir(_keras_ops) if not name.startswith("_")]


__all__ += [name for name in _keras_names() if name not in __all__]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(_keras_ops, name):
        text = f"neither multigrad.ops nor keras.ops has an attribute {name!r}"
        raise AttributeError(text + _did_you_mean(name, __all__))
    return _mirror_of(name, getattr(_keras_ops, name))


def _mirror_of(name: str, keras_object: Any) -> Any:
    """Return what replaces an object of Keras: a mirror of a submodule, a fixed op or the object itself."""
    if isinstance(keras_object, ModuleType):
        return _SUBMODULES[name]
    # A submodule may have a different function with the name of a fixed op.
    return _FIXED[name] if name in _FIXED and keras_object is getattr(_keras_ops, name) else keras_object


def __dir__() -> list[str]:
    return sorted({*__all__, *_keras_names()})


class _Submodule(ModuleType):
    """A submodule of `keras.ops`, with the fixed ops."""

    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(f"{__name__}.{name}", module.__doc__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        keras_object = getattr(self._module, name)
        own_name = f"{self.__name__.removeprefix(__name__ + '.')}.{name}"  # such as image.hsv_to_rgb
        return _FIXED.get(own_name) or _mirror_of(name, keras_object)

    def __dir__(self) -> list[str]:
        return dir(self._module)


_SUBMODULES = {
    name: _Submodule(name, value) for name, value in vars(_keras_ops).items() if isinstance(value, ModuleType)
}
# For `import multigrad.ops.nn` and `from multigrad.ops.nn import relu`.
sys.modules.update({module.__name__: module for module in _SUBMODULES.values()})
