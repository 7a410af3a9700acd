"""Ops with few values, whose own gradient is zero: another one is passed through them."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from multigrad.core.errors import describe, message, shape_text, unusable
from multigrad.core.op import op_custom_gradient
from multigrad.core.signature import name_of
from multigrad.ops.arguments import Pair, Tensor, floating, is_number, may_be_alike, tensor_of, with_plain
from multigrad.ops.dtypes import cast, dtype_of, exact, has_gradient
from multigrad.ops.routing import fitting


def straight_through(fn: Callable[[Any], Any], *, name: str | None = None) -> Callable[[Any], Any]:
    """The function with the gradient of the identity: a straight-through estimator.

    ```python
    from keras import ops
    from multigrad import grad
    from multigrad.ops import straight_through

    floor = straight_through(ops.floor)
    print(floor(2.7), grad(floor)(2.7))  # 2.0 1.0
    ```

    Arguments:
        fn: a function of one tensor to one of the same shape, of a floating dtype.
        name: one of the form `package>name`, for a model with the op to be saved.

    Returns:
        A function with the values of `fn`. For an upstream gradient `u`, its gradient is `u`.

    Raises:
        TypeError: on a call, where the input is no tensor, or the output is not floating: nothing could come
            back to it.
        ValueError: on a call, where the output has another shape than the input.

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
            raise TypeError(
                message(
                    title,
                    "the function's output is not floating, and so no gradient can come back to it",
                    required="an output of a floating dtype, such as the input's",
                    got=describe(y),
                    fix="cast the output inside of the function: keras.ops.cast(..., x.dtype)",
                )
            )
        if not may_be_alike(x.shape, y.shape):
            raise ValueError(
                message(
                    title,
                    "the function changes the shape, and so the upstream gradient is none of its input",
                    required=f"an output of shape {shape_text(x.shape)}, the input's",
                    got=describe(y),
                    fix="change the shape outside of straight_through",
                )
            )
        return y, lambda upstream: upstream

    return op


@op_custom_gradient(name="multigrad>round_straight_through")
def round_straight_through(x: Tensor) -> Pair:
    """`x` rounded to integers, half to even, with the gradient of the identity.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 3.0 * ops.round_straight_through(x))(2.7))  # 3.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.

    Returns:
        A tensor of the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u`.

    Raises:
        TypeError: when `x` is not floating.

    References:
        Bengio, Léonard and Courville 2013, arXiv:1308.3432.
    """
    return ops.round(floating("round_straight_through", "x", x)), lambda upstream: upstream


@with_plain("limit")
@op_custom_gradient(name="multigrad>sign_straight_through")
def sign_straight_through(x: Tensor, limit: float | None = 1.0) -> Pair:
    """The sign of `x`, with the gradient of the identity up to a limit.

    ```python
    from keras import ops as kops
    from multigrad import grad, ops

    print(grad(lambda x: kops.sum(ops.sign_straight_through(x)))(kops.array([0.5, -2.0])))  # [1., 0.]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        limit: the largest absolute value of `x` at which there is a gradient; None for no limit.

    Returns:
        -1, 0 or 1 in the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u` where
        `abs(x) <= limit`, and 0 elsewhere: that of a hard tanh.

    Raises:
        TypeError: when `x` is not floating, or the limit is no number.
        ValueError: when the limit is negative.

    References:
        Hubara et al. 2016, Binarized Neural Networks, arXiv:1602.02830.
    """
    x = floating("sign_straight_through", "x", x)
    if limit is None:
        return ops.sign(x), lambda upstream: upstream
    if not is_number(limit) or not limit >= 0.0:
        kind = ValueError if is_number(limit) else TypeError
        required, fix = "a number of Python's or NumPy's, 0 or more, or None", "write limit=1.0, for example"
        raise unusable(kind, "sign_straight_through", "limit", required=required, got=limit, fix=fix)
    within = ops.abs(x) <= limit
    return ops.sign(x), lambda upstream: ops.where(within, upstream, ops.zeros_like(upstream))


@op_custom_gradient(name="multigrad>clip_straight_through")
def clip_straight_through(x: Tensor, low: float | Tensor, high: float | Tensor) -> Pair:
    """`x` clipped to a range, with the gradient of the identity, so that what left the range may come back.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 3.0 * ops.clip_straight_through(x, -1.0, 1.0))(2.0))  # 3.0
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        low, high: the ends of the range, numbers or tensors that broadcast to the shape of `x`. They have no
            gradient.

    Returns:
        A tensor of the shape and dtype of `x`. For an upstream gradient `u`, the gradient is `u`.

    Raises:
        TypeError: when `x` is not floating.
        ValueError: when the shape of an end does not broadcast to that of `x`, or numbers are in the wrong
            order.

    References:
        Bengio, Léonard and Courville 2013, arXiv:1308.3432.
    """
    x = floating("clip_straight_through", "x", x)
    if is_number(low) and is_number(high) and not low <= high:
        required, fix = f"a number that is not less than low, {low!r}", "pass the smaller one first"
        raise unusable(ValueError, "clip_straight_through", "high", required=required, got=high, fix=fix)
    ends = {"low": low, "high": high}
    low, high = [fitting("clip_straight_through", name, end, x) for name, end in ends.items()]
    # In the dtype of `x`: a wider end is an error on TensorFlow, and makes a wider output on JAX.
    low, high = [cast(end, dtype_of(x)) for end in (low, high)]
    return ops.clip(x, low, high), lambda upstream: (upstream, None, None)


@with_plain("bits", "signed")
@op_custom_gradient(name="multigrad>fake_quantize")
def fake_quantize(x: Tensor, step: float | Tensor, bits: int = 8, signed: bool = True) -> Pair:
    """`x` in steps of a learned size, as learned step size quantization has it.

    ```python
    from multigrad import ops

    y = ops.fake_quantize(ops.array([0.26, 5.0]), 0.1, bits=4)
    print(ops.convert_to_numpy(y))  # [0.3, 0.7]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        step: the positive size of a step: a number, or a tensor or Variable that broadcasts to the shape of
            `x`, such as one with a step for each channel.
        bits: how many bits a value has, 2 or more; 1 or more where it is not signed.
        signed: whether values are `-2**(bits - 1)` to `2**(bits - 1) - 1` steps, or 0 to `2**bits - 1`.

    Returns:
        `step * round(clip(x / step, low, high))`, in the shape and dtype of `x`. With `v = x / step` and an
        upstream gradient `u`, the gradient by `x` is `u` where `low < v < high`, and 0 elsewhere. That by
        `step` is the sum of `u * (round(v) - v)` there, of `u * low` below and of `u * high` above, divided
        by `sqrt(n * high)` for the `n` elements of `x` that share a step.

    Raises:
        TypeError: when `x` is not floating.
        ValueError: for too few bits, a step that is a number and not positive, or steps whose shape does not
            broadcast to that of `x`.

    References:
        Esser et al. 2020, Learned Step Size Quantization, arXiv:1902.08153, equations 1 to 5 and section 2.2.
    """
    low, high = map(float, levels(bits, signed))  # of which some are no integers of 32 bits
    if is_number(step) and not step > 0.0:
        required, fix = "a positive number, or a tensor of such", "pass step=0.1, for example"
        raise unusable(ValueError, "fake_quantize", "step", required=required, got=step, fix=fix)
    x = floating("fake_quantize", "x", x)
    dtype = dtype_of(x)
    # Half precision has no number for a small step, or for `n * high` of some hundred elements.
    wide = exact(dtype)
    learned, step = has_gradient(step), cast(fitting("fake_quantize", "step", step, x), wide)
    v = ops.cast(x, wide) / step
    whole = ops.round(ops.clip(v, low, high))
    inside = ops.logical_and(v > low, v < high)

    def by_step(upstream: Any) -> Any:
        shared = ops.cast(ops.size(x) / ops.maximum(ops.size(step), 1), wide)
        return ops.cast(upstream, wide) * ops.where(inside, whole - v, whole) / ops.sqrt(shared * high)

    def rule(upstream: Any) -> Any:
        by_x = ops.where(inside, upstream, ops.zeros_like(upstream))
        return by_x, by_step(upstream) if learned else None, None, None

    return ops.cast(step * whole, dtype), rule


def levels(bits: int, signed: bool) -> tuple[int, int]:
    """The lowest and the highest number of steps that a value of so many bits can have."""
    if not is_number(bits) or bits % 1 or bits < (2 if signed else 1):
        raise ValueError(
            message(
                "fake_quantize",
                "there is no such number of bits",
                argument="'bits'",
                required="an integer, 2 or more; 1 or more with signed=False",
                got=f"{bits!r}, signed={signed!r}",
                fix="pass bits=8, for example",
            )
        )
    bits = int(bits)
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
