"""Elementwise functions with right gradients. Each docstring states the derivative."""

import math
from typing import Any

from keras import ops

from multigrad.ops.arguments import Tensor
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.fixed.common import by_derivative, is_complex, quotient, replacement


@by_derivative("jax", real_only=True)
def abs(u: Any, y: Any, x: Tensor) -> Any:  # noqa: A001  the name in Keras
    """`sign(x)`, which is 0 at 0."""
    return u * ops.sign(x)


@by_derivative("jax", real_only=True)
def absolute(u: Any, y: Any, x: Tensor) -> Any:
    """`sign(x)`, which is 0 at 0."""
    return u * ops.sign(x)


@by_derivative("jax")
def fabs(u: Any, y: Any, x: Tensor) -> Any:
    """`sign(x)`, which is 0 at 0."""
    return u * ops.sign(x)


@by_derivative("tensorflow", "torch")
def cbrt(u: Any, y: Any, x: Tensor) -> Any:
    """`1 / (3 * cbrt(x)**2)`, which is infinite at 0."""
    return u / (3.0 * y * y)


@by_derivative()
def sinc(u: Any, y: Any, x: Tensor) -> Any:
    """`(cos(pi * x) - sinc(x)) / x`, and its series near 0, where the quotient cancels."""
    t = math.pi * x
    near, infinite = ops.abs(t) < 0.5, ops.isinf(x)
    small = ops.where(near, t, ops.zeros_like(t))
    square = small * small
    series = ops.zeros_like(t)
    for k in range(8 if dtype_of(x) == "float64" else 4, 0, -1):
        series = (-1.0) ** k * 2.0 * k / math.factorial(2 * k + 1) + square * series
    far = ops.where(ops.logical_or(near, infinite), ops.ones_like(x), x)
    slope = ops.where(near, math.pi * small * series, (ops.cos(math.pi * far) - y) / far)
    return u * ops.where(infinite, ops.zeros_like(x), slope)


@replacement()
def angle(x: Tensor) -> Tensor:
    """0 for real numbers, and that of `arctan2` for complex numbers."""
    return arctan2(ops.imag(x), ops.real(x)) if is_complex(x) else _angle(x)


@by_derivative()
def _angle(u: Any, y: Any, x: Tensor) -> Any:
    """0 for real numbers."""
    return ops.zeros_like(u)


@by_derivative("jax")
def clip(u: Any, y: Any, x: Tensor, x_min: float | Tensor | None, x_max: float | Tensor | None) -> Any:
    """1 for `x` in the closed interval, and 0 outside, where the bound has the gradient."""
    # The value is min(max(x, x_min), x_max), also where x_min > x_max.
    high = x_max if x_max is not None else x if x_min is None else ops.maximum(x, x_min)
    low = ops.minimum(x, high) if x_min is None else x_min
    is_above = ops.logical_or(ops.greater(x, high), ops.greater(low, high))
    is_below = ops.logical_and(ops.less(x, low), ops.logical_not(is_above))
    below, above = (ops.cast(condition, u.dtype) for condition in (is_below, is_above))
    return lambda: u * (1.0 - below) * (1.0 - above), lambda: u * below, lambda: u * above


def _extreme(u: Any, x1: Any, x2: Any, sign: float, ignores_nan: bool = False) -> Any:
    greater, less = (ops.cast(c, u.dtype) for c in (ops.greater(x1, x2), ops.less(x1, x2)))
    first = 0.5 + 0.5 * sign * (greater - less)
    if ignores_nan:
        nan1, nan2 = (ops.cast(ops.isnan(value), u.dtype) for value in (x1, x2))
        first = first * (1.0 - nan1) + (1.0 - first) * nan2 * (1.0 - nan1)
    return lambda: u * first, lambda: u * (1.0 - first)


@by_derivative("tensorflow")
def maximum(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """1 for the greater argument, and half for each if they are equal."""
    return _extreme(u, x1, x2, 1.0)


@by_derivative("tensorflow")
def minimum(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """1 for the smaller argument, and half for each if they are equal."""
    return _extreme(u, x1, x2, -1.0)


@by_derivative()
def fmax(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """1 for the greater argument, or the one that is not NaN, and half for each if they are equal."""
    return _extreme(u, x1, x2, 1.0, ignores_nan=True)


@by_derivative()
def fmin(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """1 for the smaller argument, or the one that is not NaN, and half for each if they are equal."""
    return _extreme(u, x1, x2, -1.0, ignores_nan=True)


@by_derivative()
def hypot(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """`x / hypot(x1, x2)` for each argument `x`, 0 if both are 0, and the limit if one is infinite."""
    of_a, of_b = ops.isinf(x1), ops.isinf(x2)
    infinite, both = ops.logical_or(of_a, of_b), ops.logical_and(of_a, of_b)
    one, zero = ops.ones_like(y), ops.zeros_like(y)
    length = ops.where(infinite, ops.where(both, math.sqrt(2.0) * one, one), y)
    a = ops.where(infinite, ops.where(of_a, ops.sign(x1), zero), x1)
    b = ops.where(infinite, ops.where(of_b, ops.sign(x2), zero), x2)
    return lambda: u * quotient(a, length), lambda: u * quotient(b, length)


def _logaddexp(u: Any, x1: Any, x2: Any, scale: float) -> Any:
    same = ops.logical_and(ops.equal(x1, x2), ops.isinf(x1))
    delta = ops.where(same, ops.zeros_like(x1 - x2), scale * (x1 - x2))
    return lambda: u * ops.sigmoid(delta), lambda: u * ops.sigmoid(-delta)


@by_derivative()
def logaddexp(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """`sigmoid(x1 - x2)` and `sigmoid(x2 - x1)`."""
    return _logaddexp(u, x1, x2, 1.0)


@by_derivative("tensorflow", "jax")
def logaddexp2(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """`sigmoid((x1 - x2) * log(2))` and `sigmoid((x2 - x1) * log(2))`."""
    return _logaddexp(u, x1, x2, math.log(2.0))


@by_derivative()
def arctan2(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """`x2 / (x1**2 + x2**2)` and `-x1 / (x1**2 + x2**2)`, and 0 if both are 0."""
    # The size cancels. It avoids the overflow and underflow of the squares.
    size = ops.maximum(ops.abs(x1), ops.abs(x2))
    inverse = ops.divide_no_nan(1.0, size)
    # The derivative at denormal numbers is too large for the dtype. It is 0, as at zero.
    inverse = ops.stop_gradient(ops.where(ops.isinf(inverse), 0.0, inverse))
    finite = ops.isfinite(size)
    a, b = (ops.where(finite, value, 0.0) * inverse for value in (x1, x2))
    # The sum of the squares is 0, or between 1 and 2.
    scale = u * (inverse / ops.maximum(a * a + b * b, 0.5))
    return lambda: b * scale, lambda: -a * scale


@by_derivative("tensorflow")
def fmod(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """1 and `-trunc(x1 / x2)`."""
    return u, lambda: u * ops.round((y - x1) / x2)


@by_derivative("torch")
def floor_divide(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """0."""
    return ops.zeros_like(u), ops.zeros_like(u)


@by_derivative("torch")
def heaviside(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """0 for `x1`, and 1 for `x2` where `x1` is 0."""
    return ops.zeros_like(u), lambda: u * ops.cast(ops.equal(x1, 0.0), u.dtype)


@by_derivative("tensorflow", "jax")
def ldexp(u: Any, y: Any, x1: Tensor, x2: Any) -> Any:
    """`2**x2`, also where `x1` is 0."""
    return ldexp(u, x2)  # the fixed op, because forward mode and second derivatives differentiate the rule


@by_derivative(real_only=True)
def power(u: Any, y: Any, x1: Tensor, x2: Tensor) -> Any:
    """`x2 * x1**(x2 - 1)` and `x1**x2 * log(x1)`, and 0 where these are 0 times infinity."""
    zero = ops.equal(x1, 0.0)

    def of_base() -> Any:
        # At a base of zero, `0 * 0**(-1)` is zero. The exponent is 1 there instead of -1.
        both = ops.logical_and(zero, ops.equal(x2, 0.0))
        exponent = ops.where(both, ops.ones_like(x1 + x2), x2 - 1.0)
        return u * x2 * power(x1, exponent)

    def of_exponent() -> Any:
        safe = ops.where(zero, ops.ones_like(x1), x1)
        return u * ops.where(zero, ops.zeros_like(y), y * ops.log(safe))

    return of_base, of_exponent
