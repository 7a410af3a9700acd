"""Elementwise functions with right gradients. Each docstring states the derivative."""

import math
from typing import Any

from keras import ops

from multigrad.ops.arguments import Pair, Tensor
from multigrad.ops.dtypes import dtype_of
from multigrad.ops.fixed.common import (
    define_replacement,
    documentation,
    entries,
    is_complex,
    operands,
    quotient,
    real_only,
    tensors,
)


def _abs(name: str, x: Any) -> Pair:
    y = getattr(ops, name)(x)

    def rule(upstream: Any) -> Any:
        return upstream * ops.sign(x)

    return y, rule


@real_only
def abs(x: Tensor) -> Pair:  # noqa: A001  the name in Keras
    """`sign(x)`, which is 0 at 0."""
    return _abs("abs", x)


@real_only
def absolute(x: Tensor) -> Pair:
    """`sign(x)`, which is 0 at 0."""
    return _abs("absolute", x)


@define_replacement
def fabs(x: Tensor) -> Pair:
    """`sign(x)`, which is 0 at 0."""
    return _abs("fabs", x)


@define_replacement
def cbrt(x: Tensor) -> Pair:
    """`1 / (3 * cbrt(x)**2)`, which is infinite at 0."""
    y = ops.cbrt(x)
    return y, lambda upstream: upstream / (3.0 * y * y)


@define_replacement
def sinc(x: Tensor) -> Pair:
    """`(cos(pi * x) - sinc(x)) / x`, and its series near 0, where the quotient cancels."""
    y = ops.sinc(x)

    def rule(upstream: Any) -> Any:
        u, z, value = operands(y, upstream, x, y)
        t = math.pi * z
        near, infinite = ops.abs(t) < 0.5, ops.isinf(z)
        small = ops.where(near, t, ops.zeros_like(t))
        square = small * small
        series = ops.zeros_like(t)
        for k in range(8 if dtype_of(z) == "float64" else 4, 0, -1):
            series = (-1.0) ** k * 2.0 * k / math.factorial(2 * k + 1) + square * series
        far = ops.where(ops.logical_or(near, infinite), ops.ones_like(z), z)
        slope = ops.where(near, math.pi * small * series, (ops.cos(math.pi * far) - value) / far)
        return u * ops.where(infinite, ops.zeros_like(z), slope)

    return y, rule


def angle(x: Tensor) -> Tensor:
    """0 for real numbers, and that of `arctan2` for complex numbers."""
    return arctan2(ops.imag(x), ops.real(x)) if is_complex(x) else _angle(x)


@define_replacement
def _angle(x: Tensor) -> Pair:
    """0 for real numbers."""
    return ops.angle(x), ops.zeros_like


angle.__doc__ = documentation(angle)


@define_replacement
def clip(x: Tensor, x_min: float | Tensor | None, x_max: float | Tensor | None) -> Pair:
    """1 for `x` in the closed interval, and 0 outside, where the bound has the gradient."""
    x, x_min, x_max = tensors("clip", x=x, x_min=x_min, x_max=x_max)
    y = ops.clip(x, x_min, x_max)

    def rule(upstream: Any) -> Any:
        # The value is min(max(x, x_min), x_max), also where x_min > x_max.
        high = x_max if x_max is not None else x if x_min is None else ops.maximum(x, x_min)
        low = ops.minimum(x, high) if x_min is None else x_min
        is_above = ops.logical_or(ops.greater(x, high), ops.greater(low, high))
        is_below = ops.logical_and(ops.less(x, low), ops.logical_not(is_above))
        below, above = (ops.cast(condition, upstream.dtype) for condition in (is_below, is_above))
        return entries(
            (x, lambda: upstream * (1.0 - below) * (1.0 - above)),
            (x_min, lambda: upstream * below),
            (x_max, lambda: upstream * above),
        )

    return y, rule


def _extreme(name: str, x1: Any, x2: Any, sign: float) -> Pair:
    x1, x2 = tensors(name, x1=x1, x2=x2)
    y = getattr(ops, name)(x1, x2)

    def rule(upstream: Any) -> Any:
        a, b = operands(y, x1, x2)
        greater, less = (ops.cast(c, upstream.dtype) for c in (ops.greater(a, b), ops.less(a, b)))
        first = 0.5 + 0.5 * sign * (greater - less)
        if name in ("fmax", "fmin"):  # they ignore a NaN
            nan1, nan2 = (ops.cast(ops.isnan(value), upstream.dtype) for value in (a, b))
            first = first * (1.0 - nan1) + (1.0 - first) * nan2 * (1.0 - nan1)
        return entries((x1, lambda: upstream * first), (x2, lambda: upstream * (1.0 - first)))

    return y, rule


@define_replacement
def maximum(x1: Tensor, x2: Tensor) -> Pair:
    """1 for the greater argument, and half for each if they are equal."""
    return _extreme("maximum", x1, x2, 1.0)


@define_replacement
def minimum(x1: Tensor, x2: Tensor) -> Pair:
    """1 for the smaller argument, and half for each if they are equal."""
    return _extreme("minimum", x1, x2, -1.0)


@define_replacement
def fmax(x1: Tensor, x2: Tensor) -> Pair:
    """1 for the greater argument, or the one that is not NaN, and half for each if they are equal."""
    return _extreme("fmax", x1, x2, 1.0)


@define_replacement
def fmin(x1: Tensor, x2: Tensor) -> Pair:
    """1 for the smaller argument, or the one that is not NaN, and half for each if they are equal."""
    return _extreme("fmin", x1, x2, -1.0)


@define_replacement
def hypot(x1: Tensor, x2: Tensor) -> Pair:
    """`x / hypot(x1, x2)` for each argument `x`, 0 if both are 0, and the limit if one is infinite."""
    x1, x2 = tensors("hypot", x1=x1, x2=x2)
    y = ops.hypot(x1, x2)

    def rule(upstream: Any) -> Any:
        u, a, b, length = operands(y, upstream, x1, x2, y)
        of_a, of_b = ops.isinf(a), ops.isinf(b)
        infinite, both = ops.logical_or(of_a, of_b), ops.logical_and(of_a, of_b)
        one, zero = ops.ones_like(length), ops.zeros_like(length)
        length = ops.where(infinite, ops.where(both, math.sqrt(2.0) * one, one), length)
        a = ops.where(infinite, ops.where(of_a, ops.sign(a), zero), a)
        b = ops.where(infinite, ops.where(of_b, ops.sign(b), zero), b)
        return entries((x1, lambda: u * quotient(a, length)), (x2, lambda: u * quotient(b, length)))

    return y, rule


def _logaddexp(name: str, x1: Any, x2: Any, scale: float) -> Pair:
    x1, x2 = tensors(name, x1=x1, x2=x2)
    y = getattr(ops, name)(x1, x2)

    def rule(upstream: Any) -> Any:
        u, a, b = operands(y, upstream, x1, x2)
        same = ops.logical_and(ops.equal(a, b), ops.isinf(a))
        delta = ops.where(same, ops.zeros_like(a - b), scale * (a - b))
        return entries((x1, lambda: u * ops.sigmoid(delta)), (x2, lambda: u * ops.sigmoid(-delta)))

    return y, rule


@define_replacement
def logaddexp(x1: Tensor, x2: Tensor) -> Pair:
    """`sigmoid(x1 - x2)` and `sigmoid(x2 - x1)`."""
    return _logaddexp("logaddexp", x1, x2, 1.0)


@define_replacement
def logaddexp2(x1: Tensor, x2: Tensor) -> Pair:
    """`sigmoid((x1 - x2) * log(2))` and `sigmoid((x2 - x1) * log(2))`."""
    return _logaddexp("logaddexp2", x1, x2, math.log(2.0))


@define_replacement
def arctan2(x1: Tensor, x2: Tensor) -> Pair:
    """`x2 / (x1**2 + x2**2)` and `-x1 / (x1**2 + x2**2)`, and 0 if both are 0."""
    x1, x2 = tensors("arctan2", x1=x1, x2=x2)
    y = ops.arctan2(x1, x2)

    def rule(upstream: Any) -> Any:
        u, a, b = operands(y, upstream, x1, x2)
        # The size cancels. It avoids the overflow and underflow of the squares.
        size = ops.maximum(ops.abs(a), ops.abs(b))
        inverse = ops.divide_no_nan(1.0, size)
        # The derivative at denormal numbers is too large for the dtype. It is 0, as at zero.
        inverse = ops.stop_gradient(ops.where(ops.isinf(inverse), 0.0, inverse))
        finite = ops.isfinite(size)
        a, b = (ops.where(finite, value, 0.0) * inverse for value in (a, b))
        # The sum of the squares is 0, or between 1 and 2.
        scale = u * (inverse / ops.maximum(a * a + b * b, 0.5))
        return entries((x1, lambda: b * scale), (x2, lambda: -a * scale))

    return y, rule


@define_replacement
def fmod(x1: Tensor, x2: Tensor) -> Pair:
    """1 and `-trunc(x1 / x2)`."""
    x1, x2 = tensors("fmod", x1=x1, x2=x2)
    y = ops.fmod(x1, x2)

    def rule(upstream: Any) -> Any:
        u, a, b, remainder = operands(y, upstream, x1, x2, y)
        return entries((x1, lambda: u), (x2, lambda: u * ops.round((remainder - a) / b)))

    return y, rule


@define_replacement
def floor_divide(x1: Tensor, x2: Tensor) -> Pair:
    """0."""
    x1, x2 = tensors("floor_divide", x1=x1, x2=x2)
    y = ops.floor_divide(x1, x2)

    def rule(upstream: Any) -> Any:
        zeros = ops.zeros_like(upstream)
        return entries((x1, lambda: zeros), (x2, lambda: zeros))

    return y, rule


@define_replacement
def heaviside(x1: Tensor, x2: Tensor) -> Pair:
    """0 for `x1`, and 1 for `x2` where `x1` is 0."""
    x1, x2 = tensors("heaviside", x1=x1, x2=x2)
    y = ops.heaviside(x1, x2)

    def rule(upstream: Any) -> Any:
        at_zero = ops.cast(ops.equal(x1, 0.0), upstream.dtype)
        return entries((x1, lambda: ops.zeros_like(upstream)), (x2, lambda: upstream * at_zero))

    return y, rule


@define_replacement
def ldexp(x1: Tensor, x2: Tensor) -> Pair:
    """`2**x2`, also where `x1` is 0."""
    x1, x2 = tensors("ldexp", x1=x1, x2=x2)
    y = ops.ldexp(x1, x2)
    # The rule calls the fixed op, because forward mode and second derivatives differentiate the rule.
    return y, lambda upstream: (ldexp(upstream, x2), None)


@real_only
def power(x1: Tensor, x2: Tensor) -> Pair:
    """`x2 * x1**(x2 - 1)` and `x1**x2 * log(x1)`, and 0 where these are 0 times infinity."""
    x1, x2 = tensors("power", x1=x1, x2=x2)
    y = ops.power(x1, x2)

    def rule(upstream: Any) -> Any:
        u, a, b, result = operands(y, upstream, x1, x2, y)
        zero = ops.equal(a, 0.0)

        def of_base() -> Any:
            # At a base of zero, `0 * 0**(-1)` is zero. The exponent is 1 there instead of -1.
            both = ops.logical_and(zero, ops.equal(b, 0.0))
            exponent = ops.where(both, ops.ones_like(a + b), b - 1.0)
            return u * b * power(a, exponent)

        def of_exponent() -> Any:
            return u * ops.where(zero, ops.zeros_like(result), result * ops.log(_one_where(zero, a)))

        return entries((x1, of_base), (x2, of_exponent))

    return y, rule


def _one_where(condition: Any, x: Any) -> Any:
    return ops.where(condition, ops.ones_like(x), x)
