"""Reductions, norms and distances with right gradients."""

import math
from typing import Any

import keras
from keras import ops

from multigrad.ops.arguments import Pair, Tensor, to_python
from multigrad.ops.fixed.common import (
    axes_of,
    define_replacement,
    divide,
    entries,
    is_complex,
    keep_axes,
    operands,
    real_only,
    tensors,
)


@real_only
def std(x: Tensor, axis: Any = None, keepdims: bool = False) -> Pair:
    """`(x - mean(x)) / (n * std(x))`, and 0 if all elements are equal."""
    (x,) = tensors("std", x=x)
    y = ops.std(x, axis=axis, keepdims=keepdims)

    def rule(upstream: Any) -> Any:
        u, z, deviation = operands(y, upstream, x, y)
        centered = z - ops.mean(z, axis=axis, keepdims=True)
        share = keep_axes(z, axis, u) / _count(z, axis)
        return share * divide(centered, keep_axes(z, axis, deviation)), None, None

    return y, rule


def _count(x: Any, axis: Any) -> Any:
    return ops.sum(ops.ones_like(ops.stop_gradient(x)), axis=axis, keepdims=True)


@real_only
def nanstd(x: Tensor, axis: Any = None, keepdims: bool = False) -> Pair:
    """`(x - mean) / (n * std)` of the elements that are not NaN, and 0 if they are equal."""
    (x,) = tensors("nanstd", x=x)
    y = ops.nanstd(x, axis=axis, keepdims=keepdims)

    def rule(upstream: Any) -> Any:
        u, z, deviation = operands(y, upstream, x, y)
        valid = ops.logical_not(ops.isnan(z))
        z, weights = ops.where(valid, z, ops.zeros_like(z)), ops.cast(valid, z.dtype)
        count = ops.sum(weights, axis=axis, keepdims=True)
        count = ops.where(ops.equal(count, 0.0), ops.ones_like(count), count)
        centered = weights * (z - ops.sum(z, axis=axis, keepdims=True) / count)
        return keep_axes(z, axis, u) / count * divide(centered, keep_axes(z, axis, deviation)), None, None

    return y, rule


@real_only
def logsumexp(x: Tensor, axis: Any = None, keepdims: bool = False) -> Pair:
    """`exp(x - logsumexp(x))`, and `1 / n` if all elements are -inf."""
    (x,) = tensors("logsumexp", x=x)
    y = ops.logsumexp(x, axis=axis, keepdims=keepdims)

    def rule(upstream: Any) -> Any:
        u, z, total = operands(y, upstream, x, y)
        total = keep_axes(z, axis, total)
        nothing = ops.logical_and(ops.isinf(total), total < 0.0)
        both = ops.broadcast_to(nothing, ops.shape(z))
        shifted = ops.where(both, ops.zeros_like(z), z) - ops.where(nothing, ops.zeros_like(total), total)
        parts = ops.where(both, 1.0 / _count(z, axis), ops.exp(shifted))
        return keep_axes(z, axis, u) * parts, None, None

    return y, rule


@define_replacement
def moments(x: Tensor, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Pair:
    """`1 / n` for the mean, and `2 * (x - mean) / n` for the variance."""
    (x,) = tensors("moments", x=x)
    mean, variance = ops.moments(x, axes, keepdims=keepdims, synchronized=synchronized)
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else axes

    def rule(upstream: Any) -> Any:
        of_mean, of_variance, z = operands(mean, *upstream, x)
        centered = z - ops.mean(z, axis=axes, keepdims=True)
        both = keep_axes(z, axes, of_mean) + 2.0 * keep_axes(z, axes, of_variance) * centered
        return (both / _count(z, axes), *[None] * 3)

    return (mean, variance), rule


def layer_normalization(
    x: Tensor,
    gamma: Any = None,
    beta: Any = None,
    axis: Any = -1,
    epsilon: float | None = None,
    **kwargs: Any,
) -> Tensor:
    if kwargs:  # `rms_scaling`, which Keras deprecates
        return ops.layer_normalization(x, gamma, beta, axis, epsilon, **kwargs)
    return _layer_normalization(x, gamma, beta, axis=axis, epsilon=epsilon)


@define_replacement
def _layer_normalization(
    x: Tensor, gamma: Any = None, beta: Any = None, axis: Any = -1, epsilon: float | None = None
) -> Pair:
    """that of `gamma * (x - mean) / sqrt(variance + epsilon) + beta`, in which both moments depend on `x`."""
    y = ops.layer_normalization(x, gamma, beta, axis=axis, epsilon=epsilon)
    count = len(x.shape)
    axes = sorted(axes_of(x, axis))
    shape = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    bound = keras.config.epsilon() if epsilon is None else epsilon

    def mean(value: Any) -> Any:
        return ops.mean(value, axis=axes, keepdims=True)

    def rule(upstream: Any) -> Any:
        u, z = operands(y, upstream, x)
        centered = z - mean(z)
        inverse = ops.rsqrt(mean(centered * centered) + bound)
        unit = centered * inverse
        scaled = u if gamma is None else u * ops.reshape(ops.cast(gamma, u.dtype), shape)
        others = [a for a in range(count) if a not in axes]
        return {
            "x": inverse * (scaled - mean(scaled) - unit * mean(scaled * unit)),
            "gamma": None if gamma is None else ops.reshape(ops.sum(u * unit, axis=others), ops.shape(gamma)),
            "beta": None if beta is None else ops.reshape(ops.sum(u, axis=others), ops.shape(beta)),
        }

    return y, rule


def norm(x: Tensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tensor:  # noqa: A002
    rank = len(getattr(x, "shape", ()))
    if ord is None and axis is None and rank > 2:  # Keras (3.15) raises on TensorFlow
        y = norm(ops.reshape(x, (-1,)))
        return ops.reshape(y, (1,) * rank) if keepdims else y
    if is_complex(x) or _order_of(x, ord, axis) is None:
        return ops.norm(x, ord=ord, axis=axis, keepdims=keepdims)
    return _norm(x, ord=to_python(ord), axis=axis, keepdims=keepdims)


norm.__doc__ = (
    "Return a matrix or vector norm.\n\n    As `keras.ops.norm`. The derivative of a vector norm or of the "
    "Frobenius norm is 0 at zero.\n    The other matrix norms are Keras's.\n    "
)


def _order_of(x: Any, ord: Any, axis: Any) -> float | None:  # noqa: A002
    """Return the order of an entrywise norm that has a rule here, or None."""
    several = isinstance(axis, (tuple, list))
    count = len(getattr(x, "shape", ())) if axis is None else len(axis) if several else 1
    if ord is None or ord == "fro":
        return 2.0
    is_number = isinstance(to_python(ord), (int, float)) and not isinstance(ord, str)
    return float(ord) if count == 1 and is_number and 1.0 <= float(ord) < math.inf else None


@define_replacement
def _norm(x: Tensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Pair:  # noqa: A002
    """`sign(x) * (abs(x) / norm(x))**(ord - 1)`, and 0 if `x` is zero."""
    (x,) = tensors("norm", x=x)
    y = ops.norm(x, ord=ord, axis=axis, keepdims=keepdims)
    order = _order_of(x, ord, axis) or 2.0

    def rule(upstream: Any) -> Any:
        u, z, length = operands(y, upstream, x, y)
        return keep_axes(z, axis, u) * _norm_slope(z, keep_axes(z, axis, length), order), None, None, None

    return y, rule


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


@real_only
def normalize(x: Tensor, axis: Any = -1, order: int = 2, epsilon: float | None = None) -> Pair:
    """that of `x / max(norm(x), epsilon)`, which is `1 / epsilon` at zero."""
    (x,) = tensors("normalize", x=x)
    y = ops.normalize(x, axis=axis, order=order, epsilon=epsilon)
    bound = keras.config.epsilon() if epsilon is None else epsilon

    def rule(upstream: Any) -> Any:
        u, z = operands(y, upstream, x)
        z = ops.reshape(z, ops.shape(u))  # a scalar is normalized as an array of one element
        length = norm(z, ord=None if order == 2 else order, axis=axis, keepdims=True)
        above = ops.greater(length, bound)
        divisor = ops.where(above, length, bound * ops.ones_like(length))
        along = ops.sum(u * z, axis=axis, keepdims=True) / divisor / divisor
        bent = ops.where(above, along, ops.zeros_like(along)) * _norm_slope(z, length, float(order))
        return ops.reshape(u / divisor - bent, ops.shape(x)), None, None, None

    return y, rule


@define_replacement
def cdist(x: Tensor, y: Tensor) -> Pair:
    """`(x - y) / distance`, and 0 where the points are equal."""
    x, y = tensors("cdist", x=x, y=y)
    distances = ops.cdist(x, y)

    def rule(upstream: Any) -> Any:
        u, a, b, length = operands(distances, upstream, x, y, distances)
        units = divide(a[..., :, None, :] - b[..., None, :, :], length[..., None])
        pulled = u[..., None] * units
        return entries((x, lambda: ops.sum(pulled, axis=-2)), (y, lambda: -ops.sum(pulled, axis=-3)))

    return distances, rule
