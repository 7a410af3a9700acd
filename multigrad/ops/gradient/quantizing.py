"""Quantizing ops. Their derivative is zero almost everywhere, so they define another gradient."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from multigrad.calculus.flat_structure import shapes_may_match
from multigrad.common.errors import describe, message, shape_text, unusable
from multigrad.core.signature import name_of
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, floating, is_number, tensor_of, with_python_numbers
from multigrad.ops.dtypes import cast, dtype_of, has_gradient, wide_dtype
from multigrad.ops.gradient.routing import broadcastable


def straight_through(fn: Callable[[Any], Any], *, name: str | None = None) -> Callable[[Any], Any]:
    """Return the function with the gradient of the identity: a straight-through estimator.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import straight_through

    floor = straight_through(ops.floor)
    print(floor(2.7), grad(floor)(2.7))  # 2.0 1.0
    ```

    Arguments:
        fn: a function of one tensor that returns a floating tensor of the same shape.
        name: a name of the form `package>name`, so that a model with the op can be saved.

    Returns:
        A function with the values of `fn`. For an upstream gradient `u`, its gradient is `u`.

    Raises:
        TypeError: in a call, if the input is not a tensor, or the output is not floating, so that it cannot
            have a gradient.
        ValueError: in a call, if the output has another shape than the input.

    References:
        Bengio, Léonard and Courville 2013, Estimating or Propagating Gradients Through Stochastic Neurons for
        Conditional Computation, arXiv:1308.3432.
    """
    title = name or name_of(fn)

    @op_custom_gradient(name=title)
    def op(x: Any) -> Pair:
        x = tensor_of(title, "x", x)
        y = fn(x)
        if not keras.backend.is_float_dtype(dtype_of(y)):
            problem = "the output of the function is not floating, so that it cannot have a gradient"
            required = "an output of a floating dtype, for example the dtype of the input"
            fix = "cast the output in the function: keras.ops.cast(..., x.dtype)"
            raise TypeError(message(title, problem, required=required, got=describe(y), fix=fix))
        if not shapes_may_match(x.shape, y.shape):
            problem = "the function changes the shape, so that the upstream gradient does not fit its input"
            required = f"an output of shape {shape_text(x.shape)}, the shape of the input"
            fix = "change the shape outside of straight_through"
            raise ValueError(message(title, problem, required=required, got=describe(y), fix=fix))
        return y, lambda upstream: upstream

    return op


@op_custom_gradient(name="multigrad>round_straight_through")
def round_straight_through(x: Tensor) -> Pair:
    """Round `x` to integers, half to even, with the gradient of the identity.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 3.0 * ops.round_straight_through(x))(2.7))  # 3.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.

    Returns:
        A tensor of the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u`.

    Raises:
        TypeError: if `x` is not floating.

    References:
        Bengio, Léonard and Courville 2013, arXiv:1308.3432.
    """
    return ops.round(floating("round_straight_through", "x", x)), lambda upstream: upstream


@with_python_numbers("limit")
@op_custom_gradient(name="multigrad>sign_straight_through")
def sign_straight_through(x: Tensor, limit: float | None = 1.0) -> Pair:
    """Return the sign of `x`, with the gradient of the identity up to a limit.

    ```python
    from keras import ops as kops
    from multigrad import grad, ops

    print(grad(lambda x: kops.sum(ops.sign_straight_through(x)))(kops.array([0.5, -2.0])))  # [1., 0.]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        limit: the largest absolute value of `x` with a gradient. None means no limit.

    Returns:
        -1, 0 or 1, with the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u` where
        `abs(x) <= limit`, and 0 elsewhere, as for a hard tanh.

    Raises:
        TypeError: if `x` is not floating, or the limit is not a number.
        ValueError: if the limit is negative.

    References:
        Hubara et al. 2016, Binarized Neural Networks, arXiv:1602.02830.
    """
    x = floating("sign_straight_through", "x", x)
    if limit is None:
        return ops.sign(x), lambda upstream: upstream
    if not is_number(limit) or not limit >= 0.0:
        kind = ValueError if is_number(limit) else TypeError
        required, fix = "a Python or NumPy number, 0 or more, or None", "write limit=1.0, for example"
        raise unusable(kind, "sign_straight_through", "limit", required=required, got=limit, fix=fix)
    within = ops.abs(x) <= limit
    return ops.sign(x), lambda upstream: ops.where(within, upstream, ops.zeros_like(upstream))


@op_custom_gradient(name="multigrad>clip_straight_through")
def clip_straight_through(x: Tensor, low: float | Tensor, high: float | Tensor) -> Pair:
    """Clip `x` to a range, with the gradient of the identity, so that elements outside can return to it.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 3.0 * ops.clip_straight_through(x, -1.0, 1.0))(2.0))  # 3.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        low, high: the bounds, numbers or tensors that broadcast to the shape of `x`. They have no gradient.

    Returns:
        A tensor of the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u`.

    Raises:
        TypeError: if `x` is not floating.
        ValueError: if the shape of a bound does not broadcast to the shape of `x`, or if `low > high`.

    References:
        Bengio, Léonard and Courville 2013, arXiv:1308.3432.
    """
    x = floating("clip_straight_through", "x", x)
    if is_number(low) and is_number(high) and not low <= high:
        required, fix = f"a number that is not less than low={low!r}", "pass the smaller one first"
        raise unusable(ValueError, "clip_straight_through", "high", required=required, got=high, fix=fix)
    bounds = {"low": low, "high": high}
    low, high = [broadcastable("clip_straight_through", name, bound, x) for name, bound in bounds.items()]
    # Cast to the dtype of `x`: TensorFlow raises for a wider bound, and JAX returns a wider output.
    low, high = [cast(bound, dtype_of(x)) for bound in (low, high)]
    return ops.clip(x, low, high), lambda upstream: (upstream, None, None)


@with_python_numbers("bits", "signed")
@op_custom_gradient(name="multigrad>fake_quantize")
def fake_quantize(x: Tensor, step: float | Tensor, bits: int = 8, signed: bool = True) -> Pair:
    """Quantize `x` with a learned step size (LSQ).

    ```python
    from multigrad import ops

    y = ops.fake_quantize(ops.array([0.26, 5.0]), 0.1, bits=4)
    print(ops.convert_to_numpy(y))  # [0.3, 0.7]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        step: the step size, which must be positive: a number, or a tensor or Variable that broadcasts to the
            shape of `x`, for example with one step size per channel.
        bits: the number of bits per value, at least 2 if signed and at least 1 if not.
        signed: whether the range is `-2**(bits - 1)` to `2**(bits - 1) - 1` steps, or 0 to `2**bits - 1`.

    Returns:
        `step * round(clip(x / step, low, high))`, with the shape and dtype of `x`. For `v = x / step` and an
        upstream gradient `u`, the gradient with respect to `x` is `u` where `low < v < high`, and 0
        elsewhere. The gradient with respect to `step` sums `u * (round(v) - v)` where `low < v < high`,
        `u * low` below and `u * high` above, and divides by `sqrt(n * high)` for the `n` elements of `x` that
        share a step.

    Raises:
        TypeError: if `x` is not floating.
        ValueError: if there are too few bits, if `step` is a number that is not positive, or if its shape
            does not broadcast to the shape of `x`.

    References:
        Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153, equations 1 to 5 and section 2.2.
    """
    low, high = map(float, level_range(bits, signed))  # floats, because some exceed 32-bit integers
    if is_number(step) and not step > 0.0:
        required, fix = "a positive number, or a tensor of positive numbers", "pass step=0.1, for example"
        raise unusable(ValueError, "fake_quantize", "step", required=required, got=step, fix=fix)
    x = floating("fake_quantize", "x", x)
    dtype = dtype_of(x)
    # Half precision cannot represent a small step, or `n * high` for some hundred elements.
    wide = wide_dtype(dtype)
    differentiable, step = has_gradient(step), cast(broadcastable("fake_quantize", "step", step, x), wide)
    v = ops.cast(x, wide) / step
    rounded = ops.round(ops.clip(v, low, high))
    inside = ops.logical_and(v > low, v < high)

    def step_gradient(upstream: Any) -> Any:
        count = ops.cast(ops.size(x) / ops.maximum(ops.size(step), 1), wide)
        return ops.cast(upstream, wide) * ops.where(inside, rounded - v, rounded) / ops.sqrt(count * high)

    def rule(upstream: Any) -> Any:
        x_gradient = ops.where(inside, upstream, ops.zeros_like(upstream))
        return x_gradient, step_gradient(upstream) if differentiable else None, None, None

    return ops.cast(step * rounded, dtype), rule


def level_range(bits: int, signed: bool) -> tuple[int, int]:
    """Return the smallest and the largest number of steps for this number of bits."""
    if not is_number(bits) or bits % 1 or bits < (2 if signed else 1):
        required = f"an integer of at least {2 if signed else 1}, with signed={signed!r}"
        fix = "pass bits=8, for example"
        raise unusable(ValueError, "fake_quantize", "bits", required=required, got=bits, fix=fix)
    bits = int(bits)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
