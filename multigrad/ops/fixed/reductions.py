"""Reductions, norms and distances with right gradients."""

import math
from typing import Any

import keras
from keras import ops

from multigrad.ops.arguments import Pair, Tensor, to_python
from multigrad.ops.dtypes import cast, dtype_of, wide_dtype
from multigrad.ops.fixed.common import (
    axes_of,
    by_derivative,
    define_op,
    divide,
    is_complex,
    keep_axes,
    replacement,
    to_operand,
)


@by_derivative("tensorflow", "jax", real_only=True)
def std(u: Any, y: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Any:
    """`(x - mean(x)) / (n * std(x))`, and 0 if all elements are equal."""
    centered = x - ops.mean(x, axis=axis, keepdims=True)
    return keep_axes(x, axis, u) / _count(x, axis) * divide(centered, keep_axes(x, axis, y))


def _count(x: Any, axis: Any) -> Any:
    return ops.sum(ops.ones_like(ops.stop_gradient(x)), axis=axis, keepdims=True)


@by_derivative(real_only=True)
def nanstd(u: Any, y: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Any:
    """`(x - mean) / (n * std)` of the elements that are not NaN, and 0 if they are equal."""
    valid = ops.logical_not(ops.isnan(x))
    z, weights = ops.where(valid, x, ops.zeros_like(x)), ops.cast(valid, x.dtype)
    count = ops.sum(weights, axis=axis, keepdims=True)
    count = ops.where(ops.equal(count, 0.0), ops.ones_like(count), count)
    centered = weights * (z - ops.sum(z, axis=axis, keepdims=True) / count)
    return keep_axes(z, axis, u) / count * divide(centered, keep_axes(z, axis, y))


@by_derivative(real_only=True)
def logsumexp(u: Any, y: Any, x: Tensor, axis: Any = None, keepdims: bool = False) -> Any:
    """`exp(x - logsumexp(x))`, and `1 / n` if all elements are -inf."""
    total = keep_axes(x, axis, y)
    nothing = ops.logical_and(ops.isinf(total), total < 0.0)
    both = ops.broadcast_to(nothing, ops.shape(x))
    shifted = ops.where(both, ops.zeros_like(x), x) - ops.where(nothing, ops.zeros_like(total), total)
    return keep_axes(x, axis, u) * ops.where(both, 1.0 / _count(x, axis), ops.exp(shifted))


@replacement("tensorflow")
@define_op
def moments(x: Tensor, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Pair:
    """`1 / n` for the mean, and `2 * (x - mean) / n` for the variance."""
    x = to_operand("moments", "x", x)
    mean, variance = ops.moments(x, axes, keepdims=keepdims, synchronized=synchronized)
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else axes

    def rule(upstream: Any) -> Any:
        dtype = wide_dtype(dtype_of(mean))
        of_mean, of_variance, z = [cast(value, dtype) for value in (*upstream, x)]
        centered = z - ops.mean(z, axis=axes, keepdims=True)
        both = keep_axes(z, axes, of_mean) + 2.0 * keep_axes(z, axes, of_variance) * centered
        return (both / _count(z, axes), *[None] * 3)

    return (mean, variance), rule


@replacement("tensorflow")
def layer_normalization(
    x: Tensor,
    gamma: Any = None,
    beta: Any = None,
    axis: Any = -1,
    epsilon: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """that of `gamma * (x - mean) / sqrt(variance + epsilon) + beta`, in which both moments depend on `x`."""
    if kwargs:  # `rms_scaling`, which Keras deprecates
        return ops.layer_normalization(x, gamma, beta, axis, epsilon, **kwargs)
    return _layer_normalization(x, gamma, beta, axis=axis, epsilon=epsilon)


@by_derivative()
def _layer_normalization(
    u: Any,
    y: Any,
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    axis: Any = -1,
    epsilon: float | None = None,
) -> Any:
    axes = sorted(axes_of(x, axis))
    others = [a for a in range(len(x.shape)) if a not in axes]
    shape = [size if i in axes else 1 for i, size in enumerate(x.shape)]

    def mean(value: Any) -> Any:
        return ops.mean(value, axis=axes, keepdims=True)

    centered = x - mean(x)
    inverse = ops.rsqrt(mean(centered * centered) + (keras.config.epsilon() if epsilon is None else epsilon))
    unit = centered * inverse
    scaled = u if gamma is None else u * ops.reshape(gamma, shape)
    return (
        inverse * (scaled - mean(scaled) - unit * mean(scaled * unit)),
        lambda: ops.reshape(ops.sum(u * unit, axis=others), ops.shape(gamma)),
        lambda: ops.reshape(ops.sum(u, axis=others), ops.shape(beta)),
    )


@replacement()
def norm(x: Tensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:  # noqa: A002
    """0 at zero for a vector norm and the Frobenius norm, and Keras's for other matrix norms."""
    rank = len(getattr(x, "shape", ()))
    if ord is None and axis is None and rank > 2:  # Keras (3.15) raises on TensorFlow
        y = norm(ops.reshape(x, (-1,)))
        return ops.reshape(y, (1,) * rank) if keepdims else y
    if is_complex(x) or _order_of(x, ord, axis) is None:
        return ops.norm(x, ord=ord, axis=axis, keepdims=keepdims)
    return _norm(x, ord=to_python(ord), axis=axis, keepdims=keepdims)


def _order_of(x: Any, ord: Any, axis: Any) -> float | None:  # noqa: A002
    """Return the order of an entrywise norm that has a rule here, or None."""
    several = isinstance(axis, (tuple, list))
    count = len(getattr(x, "shape", ())) if axis is None else len(axis) if several else 1
    if ord is None or ord == "fro":
        return 2.0
    is_number = isinstance(to_python(ord), (int, float)) and not isinstance(ord, str)
    return float(ord) if count == 1 and is_number and 1.0 <= float(ord) < math.inf else None


@by_derivative()
def _norm(u: Any, y: Any, x: Tensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:  # noqa: A002
    """`sign(x) * (abs(x) / norm(x))**(ord - 1)`, and 0 if `x` is zero."""
    order = _order_of(x, ord, axis) or 2.0
    return keep_axes(x, axis, u) * _norm_slope(x, keep_axes(x, axis, y), order)


def _norm_slope(x: Any, length: Any, order: float) -> Any:
    """Return the derivative of the norm of `x`."""
    if order == 1.0:
        return ops.sign(x)
    unit = divide(x, length)
    if order == 2.0:
        return unit
    size = unit * ops.sign(unit)
    zero = ops.equal(size, 0.0)
    powers = ops.power(ops.where(zero, ops.ones_like(size), size), order - 1.0)
    return ops.sign(unit) * ops.where(zero, ops.zeros_like(size), powers)


@by_derivative(real_only=True)
def normalize(u: Any, y: Any, x: Tensor, axis: Any = -1, order: int = 2, epsilon: float | None = None) -> Any:
    """that of `x / max(norm(x), epsilon)`, which is `1 / epsilon` at zero."""
    z = ops.reshape(x, ops.shape(u))  # a scalar is normalized as an array of one element
    bound = keras.config.epsilon() if epsilon is None else epsilon
    length = norm(z, ord=None if order == 2 else order, axis=axis, keepdims=True)
    above = ops.greater(length, bound)
    divisor = ops.where(above, length, bound * ops.ones_like(length))
    along = ops.sum(u * z, axis=axis, keepdims=True) / divisor / divisor
    bent = ops.where(above, along, ops.zeros_like(along)) * _norm_slope(z, length, float(order))
    return ops.reshape(u / divisor - bent, ops.shape(x))


@by_derivative()
def cdist(u: Any, distances: Any, x: Tensor, y: Tensor) -> Any:
    """`(x - y) / distance`, and 0 where the points are equal."""
    units = divide(x[..., :, None, :] - y[..., None, :, :], distances[..., None])
    pulled = u[..., None] * units
    return lambda: ops.sum(pulled, axis=-2), lambda: -ops.sum(pulled, axis=-3)
