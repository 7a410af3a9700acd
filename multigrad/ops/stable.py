"""Functions that plain code, or its derivative, breaks at zero or at the ends of a dtype.

Each is computed in a form in which nothing on the way overflows, vanishes or cancels before the result does,
and in float32 for half precision. The rules are written so that their own derivatives are right, too: one by
`abs` at zero, for example, would be zero.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from multigrad.core.errors import unusable
from multigrad.core.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, check_axes, tensor_of, with_plain
from multigrad.ops.dtypes import cast, dtype_of, exact, has_gradient


@op_custom_gradient(name="multigrad>log1pexp")
def log1pexp(x: Tensor) -> Pair:
    """`log(1 + exp(x))`, for `x` of any size: softplus.

    ```python
    from multigrad import grad, ops

    print(ops.log1pexp(100.0), grad(ops.log1pexp)(100.0))  # 100.0 1.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `max(x, 0) + log1p(exp(-abs(x)))`, in the shape and dtype of `x`; in Keras's float dtype for integers.
        For an upstream gradient `u`, the gradient is `u * sigmoid(x)`.

    Raises:
        TypeError: where `x` is complex.

    References:
        Mächler 2012, Accurately Computing log(1 - exp(-|a|)), the vignette of the R package Rmpfr.
    """
    return _by_elements("log1pexp", x, _log1pexp, lambda u, x: u * _sigmoid(x))


@op_custom_gradient(name="multigrad>logcosh")
def logcosh(x: Tensor) -> Pair:
    """`log(cosh(x))`, for `x` of any size: `x**2 / 2` close to zero, and `abs(x) - log(2)` far from it.

    ```python
    from multigrad import grad, ops

    print(ops.logcosh(1e30), grad(ops.logcosh)(-1e30))  # 1e+30 -1.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `log1p(m**2 / (2 + 2 * m))` with `m = expm1(abs(x))` up to 1, and
        `abs(x) - log(2) + log1p(exp(-2 * abs(x)))` above, in the shape and dtype of `x`; in Keras's float
        dtype for integers. For an upstream gradient `u`, the gradient is `u * tanh(x)`.

    Raises:
        TypeError: where `x` is complex.

    References:
        `cosh(x) = 1 + 2 * sinh(x / 2)**2`: Abramowitz and Stegun 1964, Handbook of Mathematical Functions,
        section 4.5; the second term is `m**2 / (2 + 2 * m)`.
    """
    return _by_elements("logcosh", x, _logcosh, lambda u, x: u * _tanh(x))


@op_custom_gradient(name="multigrad>safe_sqrt")
def safe_sqrt(x: Tensor) -> Pair:
    """The square root, with a gradient of zero at zero, where that of the square root is infinite.

    ```python
    from multigrad import grad, ops

    print(ops.safe_sqrt(0.0), grad(ops.safe_sqrt)(0.0))  # 0.0 0.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `sqrt(x)`, in the shape and dtype of `x`; in Keras's float dtype for integers. For an upstream
        gradient `u`, the gradient is `u / (2 * sqrt(x))`, and `0 * u` at zero, as are all further ones: zero
        where `u` is finite. Only zero is taken out. Of a negative number the value and the gradient are NaN,
        as those of `sqrt`.

    Raises:
        TypeError: where `x` is complex.

    References:
        JAX's frequently asked questions, [Gradients contain NaN where using where](
        https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where).
    """
    return _by_elements("safe_sqrt", x, ops.sqrt, _pull_sqrt)


@op_custom_gradient(name="multigrad>safe_log")
def safe_log(x: Tensor) -> Pair:
    """The logarithm, with a finite value and a gradient of zero at zero.

    ```python
    from multigrad import grad, ops

    print(0.0 * ops.safe_log(0.0), grad(ops.safe_log)(0.0))  # 0.0 0.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `log(x)`, in the shape and dtype of `x`; in Keras's float dtype for integers. At zero it is the
        logarithm of the smallest positive number of the dtype: about -16.6 in float16, -92.2 in bfloat16,
        -103.3 in float32 and -744.4 in float64. So it never falls as `x` grows, nothing is less than at zero,
        and `0 * safe_log(0)` is zero. For an upstream gradient `u`, the gradient is `u / x`, and `0 * u` at
        zero, as are all further ones: zero where `u` is finite. Only zero is taken out, and what the backend
        takes for it: JAX and TensorFlow on a CPU flush numbers below the smallest normal one. Of a negative
        number the value and the gradient are NaN, as those of `log`.

    Raises:
        TypeError: where `x` is complex.

    References:
        JAX's frequently asked questions, [Gradients contain NaN where using where](
        https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where).
    """
    x = _real("safe_log", "x", x)
    floor = math.log(2.0) * _SMALLEST[_result_dtype(x)]

    def value(x: Any) -> Any:
        zero = ops.equal(x, 0.0)
        return ops.where(zero, floor * ops.ones_like(x), ops.log(ops.where(zero, ops.ones_like(x), x)))

    return _by_elements("safe_log", x, value, _pull_log)


@op_custom_gradient(name="multigrad>safe_divide")
def safe_divide(x: float | Tensor, y: float | Tensor) -> Pair:
    """`x / y`, and zero with gradients of zero where `y` is zero.

    ```python
    from multigrad import grad, ops

    print(ops.safe_divide(3.0, 0.0), grad(ops.safe_divide, argnums=(0, 1))(3.0, 0.0))  # 0.0 (0.0, 0.0)
    ```

    The values are those of `keras.ops.divide_no_nan`, but that no NaN is hidden.

    Arguments:
        x, y: tensors of real floating dtypes, or of integers, whose shapes broadcast; or numbers.

    Returns:
        `x / y` in the shape to which both broadcast, and the dtype that Keras promotes both to; 0 where `y`
        is zero, and NaN there where `x` is NaN. For an upstream gradient `u`, the gradients are `u / y` by
        `x` and `-u * (x / y / y)` by `y`, each summed to the shape of its argument; and `0 * u` where `y` is
        zero, as are all further ones: zero where `u` is finite. Zero is what the backend takes for it: JAX
        and TensorFlow on a CPU flush numbers below the smallest normal one.

    Raises:
        TypeError: where one of them is complex.

    References:
        `tf.math.divide_no_nan`.
    """
    x, y = _real("safe_divide", "x", x), _real("safe_divide", "y", y)
    dtype = _result_dtype(x, y)

    def wide() -> tuple[Any, Any, Any]:
        a, b = _wide(x, dtype), _wide(y, dtype)
        zero = ops.equal(b, 0.0)
        return a, ops.where(zero, ops.ones_like(b), b), zero

    def rule(upstream: Any) -> Any:
        a, b, zero = wide()
        u = _wide(upstream, dtype)
        by_x = u * ops.cast(ops.logical_not(zero), b.dtype) / b
        # Apart: of `a / b / b` XLA makes one division, by a square that overflows or vanishes.
        by_y = -u * (ops.where(zero, ops.zeros_like(b), a / b) / b)
        return by_x if has_gradient(x) else None, by_y if has_gradient(y) else None

    a, b, zero = wide()
    void = ops.logical_and(zero, ops.equal(a, a))
    return ops.cast(ops.where(void, ops.zeros_like(b), a / b), dtype), rule


@with_plain("axis", "keepdims")
@op_custom_gradient(name="multigrad>safe_norm")
def safe_norm(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Pair:
    """The Euclidean norm, with a gradient of zero at zero, and no squares that overflow or vanish.

    ```python
    from multigrad import grad, ops

    print(ops.safe_norm(ops.array([3e30, 4e30])))  # 5e+30
    print(grad(ops.safe_norm)(ops.array([0.0, 0.0])))  # [0., 0.]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.
        axis: the axis, or axes in a tuple, along which the norm is taken; all of them if not given.
        keepdims: whether these axes stay, with one element each.

    Returns:
        `s * sqrt(sum((x / s)**2))` for the largest absolute value `s`, in the dtype of `x`; in Keras's float
        dtype for integers. For an upstream gradient `u`, the gradient is `u * x / norm`, which is right where
        the norm itself is too large for the dtype, too. Where all of `x` is zero, it is `0 * u`, a
        subgradient, as are all further ones: zero where `u` is finite. With infinite elements the norm is
        infinite; the gradient is NaN by those, which have no direction, and 0 by the others.

    Raises:
        TypeError: where `x` is complex.
        ValueError: where `x` has no such axis.

    References:
        Blue 1978, A Portable Fortran Program to Find the Euclidean Norm of a Vector, ACM Transactions on
        Mathematical Software 4(1).
    """
    x = _real("safe_norm", "x", x)
    check_axes("safe_norm", x, axis)
    dtype = _result_dtype(x)

    def rule(upstream: Any) -> Any:
        unit, _, length = _in_units(_wide(x, dtype), axis)
        zero = ops.equal(length, 0.0)
        direction = unit / ops.where(zero, ops.ones_like(length), length)
        # Chosen and not multiplied with zero, as a derivative of the unit at zero would be one.
        direction = ops.where(zero, ops.zeros_like(unit), direction)
        return ops.reshape(_wide(upstream, dtype), ops.shape(length)) * direction, None, None

    _, scale, length = _in_units(_wide(x, dtype), axis)
    norm = scale * length
    return ops.cast(norm if keepdims else ops.squeeze(norm, axis), dtype), rule


def _in_units(x: Any, axis: Any) -> tuple[Any, Any, Any]:
    """`x` in units of its largest absolute value, that value, and the norm of `x` in units.

    By the unit nothing is to be differentiated: the direction of `x` is the same for any other.
    """
    if axis is None and len(x.shape):  # PyTorch (Keras 3.15) drops them then, keepdims or not
        axis = tuple(range(len(x.shape)))
    scale = ops.ones_like(ops.sum(x, axis=axis, keepdims=True))
    if 0 not in tuple(x.shape):
        largest = ops.amax(_size(ops.stop_gradient(x)), axis=axis, keepdims=True)
        usable = ops.logical_and(largest > 0.0, largest < float("inf"))
        # XLA may divide by a scale as it multiplies by the inverse, which must not be subnormal.
        bound = _LARGEST_SCALE[dtype_of(x)] * scale
        scale = ops.where(usable, ops.where(largest < bound, largest, bound), scale)
    unit = x / scale
    squared = ops.sum(unit * unit, axis=axis, keepdims=True)
    zero = ops.equal(squared, 0.0)
    length = ops.sqrt(ops.where(zero, ops.ones_like(squared), squared))
    return unit, scale, ops.where(zero, squared, length)


def _size(x: Any) -> Any:
    # On OpenVINO (2026), `abs` takes a number that was cast from half precision for a positive one.
    return ops.where(x < 0.0, -x, x)


def _log1pexp(x: Any) -> Any:
    return ops.relu(x) + ops.log1p(ops.exp(-_size(x)))


def _sigmoid(x: Any) -> Any:
    # That of Keras has the derivative `s * (1 - s)`, which has no digits left where `s` is close to 1.
    positive = ops.greater_equal(x, 0.0)
    e = ops.exp(ops.where(positive, -x, x))
    return ops.where(positive, ops.ones_like(e), e) / (1.0 + e)


def _logcosh(x: Any) -> Any:
    size = _size(x)
    m = ops.expm1(ops.where(size < 1.0, size, ops.ones_like(size)))
    near = ops.log1p(m * (0.5 * m / (1.0 + m)))
    far = (size - math.log(2.0)) + ops.log1p(ops.square(ops.exp(-size)))  # twice the size may overflow
    return ops.where(size < 1.0, near, far)


def _tanh(x: Any) -> Any:
    # That of Keras has the derivative `1 - t**2`, which has no digits left where `t` is close to 1.
    near = _size(x) < 0.5
    m = ops.expm1(2.0 * ops.where(near, x, ops.zeros_like(x)))
    e = ops.square(ops.exp(-_size(x)))  # twice the size may overflow
    return ops.where(near, m / (2.0 + m), ops.sign(x) * (1.0 - e) / (1.0 + e))


# A factor of zero, and no choice of zero, lets pass what is NaN in the upstream gradient. It is divided, and
# not multiplied by an inverse, which has half of the digits in graphs of TensorFlow (2.21) for large numbers.


def _pull_sqrt(upstream: Any, x: Any) -> Any:
    zero, one = ops.equal(x, 0.0), ops.ones_like(x)
    return upstream * ops.where(zero, ops.zeros_like(x), one) / (2.0 * ops.sqrt(ops.where(zero, one, x)))


def _pull_log(upstream: Any, x: Any) -> Any:
    zero, one = ops.equal(x, 0.0), ops.ones_like(x)
    factor = ops.where(x > 0.0, one, ops.where(zero, ops.zeros_like(x), float("nan") * one))
    return upstream * factor / ops.where(zero, one, x)


def _by_elements(op: str, x: Any, value: Callable[[Any], Any], pull: Callable[[Any, Any], Any]) -> Pair:
    """The output and the rule of a function of each element alone."""
    x = _real(op, "x", x)
    dtype = _result_dtype(x)

    def rule(upstream: Any) -> Any:
        return pull(_wide(upstream, dtype), _wide(x, dtype))

    return ops.cast(value(_wide(x, dtype)), dtype), rule


_LARGEST_SCALE = {"float32": 2.0**126, "float64": 2.0**1022}
"""The inverse of the smallest normal number: of a larger one, the inverse is subnormal."""

_SMALLEST = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}
"""The exponent of two of the smallest positive number."""


def _result_dtype(*values: Any) -> str:
    """The float dtype of what Keras computes of these."""
    given = [dtype_of(value) if hasattr(value, "dtype") else type(value) for value in values]
    # Keras (3.15) promotes float64 with a Python number to float32, but on TensorFlow.
    if "float64" in given:
        return "float64"
    return str(keras.backend.result_type(*given, float))


def _wide(x: Any, dtype: str) -> Any:
    """In the dtype in which what is of `dtype` is computed."""
    return cast(x, exact(dtype))


def _real(op: str, argument: str, x: Any) -> Any:
    """The argument, a list of numbers as a tensor; it must not be complex."""
    if not isinstance(x, (int, float, complex)):
        x = tensor_of(op, argument, x)
    dtype = dtype_of(x) if hasattr(x, "dtype") else type(x).__name__
    if dtype.startswith("complex"):
        required, fix = "a real dtype", "pass the real and the imaginary part, or the absolute value"
        raise unusable(TypeError, op, argument, required=required, got=x, fix=fix)
    return x
