"""Activations with right gradients, and one convention where they have no derivative."""

from typing import Any

from keras import ops

from multigrad.ops.arguments import Tensor
from multigrad.ops.fixed.common import by_derivative

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017


def _by_sign(x: Any, positive: Any, other: Any) -> Any:
    return ops.where(ops.greater(x, 0.0), positive * ops.ones_like(x), other)


@by_derivative("jax")
def leaky_relu(u: Any, y: Any, x: Tensor, negative_slope: float = 0.2) -> Any:
    """1 for positive numbers, and the slope for others."""
    return u * _by_sign(x, 1.0, negative_slope * ops.ones_like(x))


@by_derivative("tensorflow", "torch")
def elu(u: Any, y: Any, x: Tensor, alpha: float = 1.0) -> Any:
    """1 for positive numbers, and `elu(x) + alpha` for others."""
    return u * _by_sign(x, 1.0, y + alpha)


@by_derivative()
def celu(u: Any, y: Any, x: Tensor, alpha: float = 1.0) -> Any:
    """1 for positive numbers, and `celu(x) / alpha + 1` for others."""
    return u * _by_sign(x, 1.0, 1.0 / alpha * y + 1.0)


@by_derivative("tensorflow", "torch")
def selu(u: Any, y: Any, x: Tensor) -> Any:
    """`scale` for positive numbers, and `selu(x) + scale * alpha` for others."""
    return u * _by_sign(x, _SELU_SCALE, y + _SELU_SCALE * _SELU_ALPHA)


@by_derivative("tensorflow", "jax")
def softsign(u: Any, y: Any, x: Tensor) -> Any:
    """`1 / (1 + abs(x))**2`."""
    size = 1.0 + x * ops.sign(x)  # the derivative of `abs` at zero depends on the backend
    return u / (size * size)


def _box(u: Any, x: Any, bound: float, slope: float) -> Any:
    """Return the gradient of a function with a derivative only between two bounds."""
    return slope * u * ops.cast(ops.logical_and(ops.greater(x, -bound), ops.less(x, bound)), u.dtype)


@by_derivative("tensorflow", "jax")
def hard_tanh(u: Any, y: Any, x: Tensor) -> Any:
    """1 between -1 and 1, and 0 outside and at these bounds."""
    return _box(u, x, 1.0, 1.0)


@by_derivative("torch")
def hard_sigmoid(u: Any, y: Any, x: Tensor) -> Any:
    """1/6 between -3 and 3, and 0 outside and at these bounds."""
    return _box(u, x, 3.0, 1.0 / 6.0)


@by_derivative("jax")
def sparse_sigmoid(u: Any, y: Any, x: Tensor) -> Any:
    """1/2 between -1 and 1, and 0 outside and at these bounds."""
    return _box(u, x, 1.0, 0.5)
