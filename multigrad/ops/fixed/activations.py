"""Activations with right gradients, and one convention where they have no derivative."""

from typing import Any

from keras import ops

from multigrad.ops.arguments import Pair, Tensor
from multigrad.ops.fixed.common import define_replacement, operands, tensors

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017


@define_replacement
def leaky_relu(x: Tensor, negative_slope: float = 0.2) -> Pair:
    """1 for positive numbers, and the slope for others."""
    (x,) = tensors("leaky_relu", x=x)
    y = ops.leaky_relu(x, negative_slope)

    def rule(upstream: Any) -> Any:
        slope = negative_slope * ops.ones_like(upstream)
        return upstream * ops.where(ops.greater(x, 0.0), ops.ones_like(upstream), slope), None

    return y, rule


def _exponential(y: Any, x: Any, scale: float, offset: float, rate: float) -> Pair:
    """Return the output, and the rule of a function that is linear for positive numbers.

    Its derivative is `scale` for positive numbers, and `rate * y + offset` for others, for the output `y`.
    """

    def rule(upstream: Any) -> Any:
        u, z, output = operands(y, upstream, x, y)
        return u * ops.where(ops.greater(z, 0.0), scale * ops.ones_like(z), rate * output + offset)

    return y, rule


@define_replacement
def elu(x: Tensor, alpha: float = 1.0) -> Pair:
    """1 for positive numbers, and `elu(x) + alpha` for others."""
    (x,) = tensors("elu", x=x)
    y, rule = _exponential(ops.elu(x, alpha), x, 1.0, alpha, 1.0)
    return y, lambda upstream: (rule(upstream), None)


@define_replacement
def celu(x: Tensor, alpha: float = 1.0) -> Pair:
    """1 for positive numbers, and `celu(x) / alpha + 1` for others."""
    (x,) = tensors("celu", x=x)
    y, rule = _exponential(ops.celu(x, alpha), x, 1.0, 1.0, 1.0 / alpha)
    return y, lambda upstream: (rule(upstream), None)


@define_replacement
def selu(x: Tensor) -> Pair:
    """`scale` for positive numbers, and `selu(x) + scale * alpha` for others."""
    (x,) = tensors("selu", x=x)
    return _exponential(ops.selu(x), x, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA, 1.0)


@define_replacement
def softsign(x: Tensor) -> Pair:
    """`1 / (1 + abs(x))**2`."""
    (x,) = tensors("softsign", x=x)
    y = ops.softsign(x)

    def rule(upstream: Any) -> Any:
        u, z = operands(y, upstream, x)
        size = 1.0 + z * ops.sign(z)  # the derivative of `abs` at zero depends on the backend
        return u / (size * size)

    return y, rule


def _box(y: Any, x: Any, bound: float, slope: float) -> Pair:
    """Return the output, and the rule of a function with a derivative only between two bounds."""

    def rule(upstream: Any) -> Any:
        inside = ops.logical_and(ops.greater(x, -bound), ops.less(x, bound))
        return slope * upstream * ops.cast(inside, upstream.dtype)

    return y, rule


@define_replacement
def hard_tanh(x: Tensor) -> Pair:
    """1 between -1 and 1, and 0 outside and at these bounds."""
    (x,) = tensors("hard_tanh", x=x)
    return _box(ops.hard_tanh(x), x, 1.0, 1.0)


@define_replacement
def hard_sigmoid(x: Tensor) -> Pair:
    """1/6 between -3 and 3, and 0 outside and at these bounds."""
    (x,) = tensors("hard_sigmoid", x=x)
    return _box(ops.hard_sigmoid(x), x, 3.0, 1.0 / 6.0)


@define_replacement
def sparse_sigmoid(x: Tensor) -> Pair:
    """1/2 between -1 and 1, and 0 outside and at these bounds."""
    (x,) = tensors("sparse_sigmoid", x=x)
    return _box(ops.sparse_sigmoid(x), x, 1.0, 0.5)
