"""Ops of Keras with right gradients, for the backends where a derivative of Keras's op is wrong or NaN.

The value of a fixed op is that of Keras's op, and its rule is a formula. Each op is registered on every
backend, so that a saved model loads everywhere. `multigrad.ops` has it only where Keras's op has a fault
(`FAULTS`).

At a point without a derivative, all backends return one convention:

| Op | Convention | Reason |
|---|---|---|
| `maximum`, `minimum`, `fmax`, `fmin`, `logaddexp` of -inf | half to each | the arguments are symmetric |
| `logsumexp` of -inf only | equal parts | the elements are symmetric |
| `abs`, `hypot`, `norm`, `std`, `cdist`, `arctan2`, `angle` at zero | 0 | the function is symmetric there |
| `clip` at a bound | 1 | the value is inside the closed interval |
| `hard_tanh`, `sparse_sigmoid`, `hard_sigmoid` at a bound | 0 | as `relu` at 0 |
| `leaky_relu`, `elu`, `selu`, `celu` at 0 | the derivative on the left | as `relu` at 0 |
"""

from collections.abc import Callable
from typing import Any

import keras

from multigrad.ops.fixed import activations, arrays, elementwise, linear_algebra, reductions

_ALL = ("tensorflow", "jax", "torch")

FAULTS: dict[str, tuple[str, ...]] = {
    "abs": ("jax",),
    "absolute": ("jax",),
    "angle": _ALL,
    "arctan2": _ALL,
    "bincount": ("tensorflow", "torch"),
    "cbrt": ("tensorflow", "torch"),
    "cdist": _ALL,
    "celu": _ALL,
    "clip": ("jax",),
    "cumprod": ("tensorflow",),
    "det": ("tensorflow", "torch"),
    "elu": ("tensorflow", "torch"),
    "fabs": ("jax",),
    "floor_divide": ("torch",),
    "fmax": _ALL,
    "fmin": _ALL,
    "fmod": ("tensorflow",),
    "full": ("torch",),
    "full_like": ("torch",),
    "hard_sigmoid": ("torch",),
    "hard_tanh": ("tensorflow", "jax"),
    "heaviside": ("torch",),
    "hypot": _ALL,
    "layer_normalization": ("tensorflow",),
    "image.hsv_to_rgb": ("tensorflow",),
    "ldexp": ("tensorflow", "jax"),
    "leaky_relu": ("jax",),
    "logaddexp": _ALL,
    "logaddexp2": ("tensorflow", "jax"),
    "logsumexp": _ALL,
    "maximum": ("tensorflow",),
    "minimum": ("tensorflow",),
    "moments": ("tensorflow",),
    "nancumprod": ("tensorflow",),
    "nanprod": ("tensorflow",),
    "nanstd": _ALL,
    "norm": _ALL,
    "normalize": _ALL,
    "power": _ALL,
    "prod": ("tensorflow",),
    "selu": ("tensorflow", "torch"),
    "sinc": _ALL,
    "slice_update": ("tensorflow",),
    "softsign": ("tensorflow", "jax"),
    "sparse_sigmoid": ("jax",),
    "std": ("tensorflow", "jax"),
    "vander": _ALL,
}
"""The backends on which Keras's op (3.15) has a fault, or another convention."""

_MODULES = (activations, arrays, elementwise, linear_algebra, reductions)


def _find(name: str) -> Callable[..., Any]:
    short = name.rpartition(".")[2]
    found = [vars(module)[short] for module in _MODULES if short in vars(module)]
    return found[0]


EVERY = {name: _find(name) for name in FAULTS}
"""All fixed ops."""

FIXED = {
    name: op
    for name, op in EVERY.items()
    if keras.backend.backend() in FAULTS[name] and (name.startswith("image.") or hasattr(keras.ops, name))
}
"""The ops that `multigrad.ops` has instead of Keras's on the active backend."""
