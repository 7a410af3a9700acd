"""Numerically stable versions of functions that fail at zero or near the limits of a dtype in plain code.

No intermediate result overflows, underflows or cancels before the final result does. Half precision is
computed in float32. The rules can be differentiated, too. For example, they do not use `abs`, whose
derivative at zero would be zero.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from multigrad.common.errors import unusable
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, check_axes, tensor_of, with_python_numbers
from multigrad.ops.dtypes import cast, dtype_of, has_gradient, nan_unless, wide_dtype


@op_custom_gradient(name="multigrad>log1pexp")
def log1pexp(x: Tensor) -> Pair:
    """Return `log(1 + exp(x))`, the softplus, without overflow.

    ```python
    from multigrad import grad, ops

    print(ops.log1pexp(100.0), grad(ops.log1pexp)(100.0))  # 100.0 1.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `max(x, 0) + log1p(exp(-abs(x)))`, with the shape and dtype of `x`. Integers give Keras's float dtype.
        For an upstream gradient `u`, the gradient is `u * sigmoid(x)`.

    Raises:
        TypeError: if `x` is complex.

    References:
        Mächler 2012, Accurately Computing log(1 - exp(-|a|)), vignette of the R package Rmpfr.
    """
    return _elementwise("log1pexp", x, _log1pexp, lambda u, x: u * _sigmoid(x))


@op_custom_gradient(name="multigrad>logcosh")
def logcosh(x: Tensor) -> Pair:
    """Return `log(cosh(x))`, without overflow or cancellation.

    ```python
    from multigrad import grad, ops

    print(ops.logcosh(1e30), grad(ops.logcosh)(-1e30))  # 1e+30 -1.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `log1p(m**2 / (2 + 2 * m))` with `m = expm1(abs(x))` for `abs(x) < 1`, and
        `abs(x) - log(2) + log1p(exp(-2 * abs(x)))` otherwise, with the shape and dtype of `x`. Integers give
        Keras's float dtype. For an upstream gradient `u`, the gradient is `u * tanh(x)`.

    Raises:
        TypeError: if `x` is complex.

    References:
        `cosh(x) = 1 + 2 * sinh(x / 2)**2`: Abramowitz and Stegun 1964, Handbook of Mathematical Functions,
        section 4.5. The second term equals `m**2 / (2 + 2 * m)`.
    """
    return _elementwise("logcosh", x, _logcosh, lambda u, x: u * _tanh(x))


@op_custom_gradient(name="multigrad>safe_sqrt")
def safe_sqrt(x: Tensor) -> Pair:
    """Return the square root, with a gradient of zero at zero, where the derivative is infinite.

    ```python
    from multigrad import grad, ops

    print(ops.safe_sqrt(0.0), grad(ops.safe_sqrt)(0.0))  # 0.0 0.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `sqrt(x)`, with the shape and dtype of `x`. Integers give Keras's float dtype. For an upstream
        gradient `u`, the gradient is `u / (2 * sqrt(x))`. At zero, the gradient and all higher derivatives
        are `0 * u`: zero if `u` is finite. For negative numbers, the value and the gradient are NaN, as for
        `sqrt`.

    Raises:
        TypeError: if `x` is complex.

    References:
        The JAX FAQ, [Gradients contain NaN where using where](
        https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where).
    """
    return _elementwise("safe_sqrt", x, ops.sqrt, _pull_sqrt)


@op_custom_gradient(name="multigrad>safe_log")
def safe_log(x: Tensor) -> Pair:
    """Return the logarithm, with a finite value and a gradient of zero at zero.

    ```python
    from multigrad import grad, ops

    print(0.0 * ops.safe_log(0.0), grad(ops.safe_log)(0.0))  # 0.0 0.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.

    Returns:
        `log(x)`, with the shape and dtype of `x`. Integers give Keras's float dtype. At zero, the value is
        the logarithm of the smallest positive number of the dtype: about -16.6 in float16, -92.2 in bfloat16,
        -103.3 in float32 and -744.4 in float64. So the function is monotonic, and `0 * safe_log(0)` is zero.
        For an upstream gradient `u`, the gradient is `u / x`. At zero, the gradient and all higher
        derivatives are `0 * u`: zero if `u` is finite. Subnormal numbers count as zero where the backend
        flushes them, as JAX and TensorFlow do on a CPU. For negative numbers, the value and the gradient are
        NaN, as for `log`.

    Raises:
        TypeError: if `x` is complex.

    References:
        The JAX FAQ, [Gradients contain NaN where using where](
        https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where).
    """
    x = _real("safe_log", "x", x)
    floor = math.log(2.0) * _SMALLEST[_result_dtype(x)]

    def value(x: Any) -> Any:
        zero = ops.equal(x, 0.0)
        return ops.where(zero, floor * ops.ones_like(x), ops.log(ops.where(zero, ops.ones_like(x), x)))

    return _elementwise("safe_log", x, value, _pull_log)


@op_custom_gradient(name="multigrad>safe_divide")
def safe_divide(x: float | Tensor, y: float | Tensor) -> Pair:
    """Return `x / y`, and zero with gradients of zero where `y` is zero.

    ```python
    from multigrad import grad, ops

    print(ops.safe_divide(3.0, 0.0), grad(ops.safe_divide, argnums=(0, 1))(3.0, 0.0))  # 0.0 (0.0, 0.0)
    ```

    The values equal `keras.ops.divide_no_nan`, except that a NaN in `x` is not hidden.

    Arguments:
        x, y: numbers, or tensors of real floating or integer dtypes, whose shapes broadcast.

    Returns:
        `x / y` with the broadcast shape and the dtype that Keras promotes both to. It is 0 where `y` is zero,
        and NaN where `x` is NaN. For an upstream gradient `u`, the gradient is `u / y` with respect to `x`,
        and `-u * (x / y / y)` with respect to `y`, summed to the shape of the argument. Where `y` is zero,
        the gradients and all higher derivatives are `0 * u`: zero if `u` is finite. Subnormal numbers count
        as zero where the backend flushes them, as JAX and TensorFlow do on a CPU.

    Raises:
        TypeError: if `x` or `y` is complex.

    References:
        `tf.math.divide_no_nan`.
    """
    x, y = _real("safe_divide", "x", x), _real("safe_divide", "y", y)
    dtype = _result_dtype(x, y)

    def operands() -> tuple[Any, Any, Any]:
        a, b = _wide(x, dtype), _wide(y, dtype)
        zero = ops.equal(b, 0.0)
        return a, ops.where(zero, ops.ones_like(b), b), zero

    def rule(upstream: Any) -> Any:
        a, b, zero = operands()
        u = _wide(upstream, dtype)
        x_gradient = u * ops.cast(ops.logical_not(zero), b.dtype) / b
        # Not `a / b / b`, which XLA computes by one division by a square, which may overflow or underflow.
        y_gradient = -u * (ops.where(zero, ops.zeros_like(b), a / b) / b)
        return x_gradient if has_gradient(x) else None, y_gradient if has_gradient(y) else None

    a, b, zero = operands()
    is_zero = ops.logical_and(zero, ops.equal(a, a))
    return ops.cast(ops.where(is_zero, ops.zeros_like(b), a / b), dtype), rule


@with_python_numbers("axis", "keepdims")
@op_custom_gradient(name="multigrad>safe_norm")
def safe_norm(x: Tensor, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Pair:
    """Return the Euclidean norm, with a gradient of zero at zero, without overflow or underflow of squares.

    ```python
    from multigrad import grad, ops

    print(ops.safe_norm(ops.array([3e30, 4e30])))  # 5e+30
    print(grad(ops.safe_norm)(ops.array([0.0, 0.0])))  # [0., 0.]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype, or of integers.
        axis: the axis, or tuple of axes, over which the norm is computed. The default is all axes.
        keepdims: whether to keep these axes, with size 1.

    Returns:
        `s * sqrt(sum((x / s)**2))` for the largest absolute value `s`, in the dtype of `x`. Integers give
        Keras's float dtype. For an upstream gradient `u`, the gradient is `u * x / norm`, which is exact even
        if the norm overflows. If all elements are zero, the gradient, a subgradient, and all higher
        derivatives are `0 * u`: zero if `u` is finite. If an element is infinite, the norm is infinite. The
        gradient is then NaN with respect to the infinite elements, and 0 with respect to the others.

    Raises:
        TypeError: if `x` is complex.
        ValueError: if `x` does not have the axes.

    References:
        Blue 1978, A Portable Fortran Program to Find the Euclidean Norm of a Vector, ACM Transactions on
        Mathematical Software 4(1).
    """
    x = _real("safe_norm", "x", x)
    check_axes("safe_norm", x, axis)
    dtype = _result_dtype(x)

    def rule(upstream: Any) -> Any:
        unit, _, length = _normalize(_wide(x, dtype), axis)
        zero = ops.equal(length, 0.0)
        # Multiplied, because XLA (JAX 0.7) makes one division of two, by a norm that may be infinite.
        direction = unit * (1.0 / ops.where(zero, ops.ones_like(length), length))
        # Selected instead of multiplied by zero, because the derivative of `unit` at zero is one.
        direction = ops.where(zero, ops.zeros_like(unit), direction)
        return ops.reshape(_wide(upstream, dtype), ops.shape(length)) * direction, None, None

    _, scale, length = _normalize(_wide(x, dtype), axis)
    norm = scale * length
    return ops.cast(norm if keepdims else ops.squeeze(norm, axis), dtype), rule


def _normalize(x: Any, axis: Any) -> tuple[Any, Any, Any]:
    """Return `x` divided by its largest absolute value, that value, and the norm of the quotient.

    The scale has no gradient, because the direction of `x` does not depend on it.
    """
    if axis is None and len(x.shape):  # because keepdims has no effect for None on PyTorch (Keras 3.15)
        axis = tuple(range(len(x.shape)))
    scale = ops.ones_like(ops.sum(x, axis=axis, keepdims=True))
    if 0 not in tuple(x.shape):
        largest = ops.amax(_abs(ops.stop_gradient(x)), axis=axis, keepdims=True)
        usable = ops.logical_and(largest > 0.0, ops.isfinite(largest))
        # XLA may multiply by the inverse of the scale, which must not be subnormal.
        bound = _LARGEST_SCALE[dtype_of(x)] * scale
        scale = ops.where(usable, ops.where(largest < bound, largest, bound), scale)
    unit = x / scale
    squared = ops.sum(unit * unit, axis=axis, keepdims=True)
    zero = ops.equal(squared, 0.0)
    length = ops.sqrt(ops.where(zero, ops.ones_like(squared), squared))
    return unit, scale, ops.where(zero, squared, length)


def _abs(x: Any) -> Any:
    # On OpenVINO (2026), `abs` returns negative numbers for tensors that were cast from half precision.
    return ops.where(x < 0.0, -x, x)


def _log1pexp(x: Any) -> Any:
    return ops.relu(x) + ops.log1p(ops.exp(-_abs(x)))


def _sigmoid(x: Any) -> Any:
    # The sigmoid of Keras has the derivative `s * (1 - s)`, which cancels where `s` is close to 1.
    positive = ops.greater_equal(x, 0.0)
    e = ops.exp(ops.where(positive, -x, x))
    return ops.where(positive, ops.ones_like(e), e) / (1.0 + e)


def _logcosh(x: Any) -> Any:
    size = _abs(x)
    m = ops.expm1(ops.where(size < 1.0, size, ops.ones_like(size)))
    near = ops.log1p(m * (0.5 * m / (1.0 + m)))
    far = (size - math.log(2.0)) + ops.log1p(ops.square(ops.exp(-size)))  # `2 * size` may overflow
    return ops.where(size < 1.0, near, far)


def _tanh(x: Any) -> Any:
    # The tanh of Keras has the derivative `1 - t**2`, which cancels where `t` is close to 1.
    near = _abs(x) < 0.5
    m = ops.expm1(2.0 * ops.where(near, x, ops.zeros_like(x)))
    e = ops.square(ops.exp(-_abs(x)))  # `2 * _abs(x)` may overflow
    return ops.where(near, m / (2.0 + m), ops.sign(x) * (1.0 - e) / (1.0 + e))


# Multiplying by zero, instead of selecting zero, preserves a NaN in the upstream gradient. The rules divide
# instead of multiplying by an inverse, which loses half of the digits for large numbers in TensorFlow (2.21)
# graphs.


def _pull_sqrt(upstream: Any, x: Any) -> Any:
    zero, one = ops.equal(x, 0.0), ops.ones_like(x)
    return upstream * ops.where(zero, ops.zeros_like(x), one) / (2.0 * ops.sqrt(ops.where(zero, one, x)))


def _pull_log(upstream: Any, x: Any) -> Any:
    zero, one = ops.equal(x, 0.0), ops.ones_like(x)
    factor = ops.where(zero, ops.zeros_like(x), nan_unless(x >= 0.0, one))
    return upstream * factor / ops.where(zero, one, x)


def _elementwise(op: str, x: Any, value: Callable[[Any], Any], pull: Callable[[Any, Any], Any]) -> Pair:
    """Return the output and the rule of an elementwise function."""
    x = _real(op, "x", x)
    dtype = _result_dtype(x)

    def rule(upstream: Any) -> Any:
        return pull(_wide(upstream, dtype), _wide(x, dtype))

    return ops.cast(value(_wide(x, dtype)), dtype), rule


_LARGEST_SCALE = {"float32": 2.0**126, "float64": 2.0**1022}
"""The inverse of the smallest normal number. The inverse of a larger number is subnormal."""

_SMALLEST = {"float16": -24, "bfloat16": -133, "float32": -149, "float64": -1074}
"""The base-2 exponent of the smallest positive number."""


def _result_dtype(*values: Any) -> str:
    """Return the float dtype of the result that Keras computes from these values."""
    dtypes = [dtype_of(value) if hasattr(value, "dtype") else type(value) for value in values]
    # Keras (3.15) promotes float64 with a Python number to float32, except on TensorFlow.
    if "float64" in dtypes:
        return "float64"
    return str(keras.backend.result_type(*dtypes, float))


def _wide(x: Any, dtype: str) -> Any:
    """Cast to the dtype in which results of `dtype` are computed."""
    return cast(x, wide_dtype(dtype))


def _real(op: str, argument: str, x: Any) -> Any:
    """Return the argument as a number or tensor. Raise TypeError if it is complex."""
    if not isinstance(x, (int, float, complex)):
        x = tensor_of(op, argument, x)
    dtype = dtype_of(x) if hasattr(x, "dtype") else type(x).__name__
    if dtype.startswith("complex"):
        required, fix = "a real dtype", "pass the real and imaginary parts, or the absolute value"
        raise unusable(TypeError, op, argument, required=required, got=x, fix=fix)
    return x
