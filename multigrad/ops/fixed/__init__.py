"""Ops of Keras with right gradients, for the backends where a derivative of Keras's op is wrong or NaN.

The value of a fixed op is that of Keras's op, and its rule is a formula. Each op is registered on every
backend, so that a saved model loads everywhere. `multigrad.ops` has it only where Keras's op has a fault
(`FAULTS`). The decorator of each op names these backends.

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

import keras

from multigrad.ops.fixed import activations, arrays, elementwise, linear_algebra, reductions  # noqa: F401
from multigrad.ops.fixed.common import EVERY, FAULTS

FIXED = {
    name: op
    for name, op in EVERY.items()
    if keras.backend.backend() in FAULTS[name] and (name.startswith("image.") or hasattr(keras.ops, name))
}
"""The ops that `multigrad.ops` has instead of Keras's on the active backend."""
