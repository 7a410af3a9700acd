"""Ops that return their input unchanged, and change its gradient."""

import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.common.errors import describe, message, shape_text, unusable
from multigrad.common.process_wide import FORWARD_MODE
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, check_axes, is_number, tensor_of, with_python_numbers
from multigrad.ops.dtypes import cast, dtype_of, wide_dtype


@op_custom_gradient(name="multigrad>scale_gradient")
def scale_gradient(x: Tensor, scale: float | Tensor) -> Pair:
    """Return `x`, and multiply its gradient by `scale`.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 5.0 * ops.scale_gradient(x, 0.1))(2.0))  # 0.5
    ```

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        scale: a number, or a tensor or Variable that broadcasts to the shape of `x`. It has no gradient.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `scale * u`.

    Raises:
        TypeError: if `x` is not a tensor, or `scale` is complex and `x` is real.
        ValueError: if the shape of `scale` does not broadcast to the shape of `x`.

    References:
        Schrittwieser et al. 2020, Mastering Atari, Go, Chess and Shogi by Planning with a Learned Model,
        arXiv:1911.08265. It halves the gradient of a recurrent step.
    """
    x = tensor_of("scale_gradient", "x", x)
    factor = broadcastable("scale_gradient", "scale", scale, x)
    return x, lambda upstream: (_times(upstream, factor), None)


@op_custom_gradient(name="multigrad>reverse_gradient")
def reverse_gradient(x: Tensor, scale: float | Tensor = 1.0) -> Pair:
    """Return `x`, and reverse its gradient, for adversarial training.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 5.0 * ops.reverse_gradient(x))(2.0))  # -5.0
    ```

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        scale: the factor, lambda in the paper: a number, or a tensor or Variable that broadcasts to the shape
            of `x`. It can grow during training. It has no gradient.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `-scale * u`.

    Raises:
        TypeError: if `x` is not a tensor, or `scale` is complex and `x` is real.
        ValueError: if the shape of `scale` does not broadcast to the shape of `x`.

    References:
        Ganin and Lempitsky 2015, Unsupervised Domain Adaptation by Backpropagation, arXiv:1409.7495.
    """
    x = tensor_of("reverse_gradient", "x", x)
    factor = broadcastable("reverse_gradient", "scale", scale, x)
    return x, lambda upstream: (-_times(upstream, factor), None)


def _times(upstream: Any, factor: Any) -> Any:
    """Return the product. Half precision is multiplied in float32, because a small factor may underflow."""
    dtype = dtype_of(upstream)
    wide = wide_dtype(dtype)
    return ops.cast(ops.cast(upstream, wide) * cast(factor, wide), dtype)


@op_custom_gradient(name="multigrad>stop_gradient_if")
def stop_gradient_if(condition: bool | Tensor, x: Tensor) -> Pair:
    """Return `x`, and stop its gradient where the condition is true.

    ```python
    from multigrad import grad, ops

    mask = ops.array([True, False])
    print(grad(lambda x: ops.sum(3.0 * ops.stop_gradient_if(mask, x)))(ops.array([1.0, 2.0])))  # [0., 3.]
    ```

    Arguments:
        condition: a bool, or a tensor of dtype bool that broadcasts to the shape of `x`.
        x: a tensor of any shape, of a floating or complex dtype.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is 0 where the condition is true, and `u` elsewhere. A
        NaN or infinite gradient is stopped, too.

    Raises:
        TypeError: if the condition is not of dtype bool.
        ValueError: if its shape does not broadcast to the shape of `x`.

    References:
        `keras.ops.stop_gradient`, which stops the gradient of all elements.
    """
    x = tensor_of("stop_gradient_if", "x", x)
    if not isinstance(condition, bool):
        condition = tensor_of("stop_gradient_if", "condition", condition)
        if dtype_of(condition) != "bool":
            name, required = "stop_gradient_if", "a bool, or a tensor of dtype bool"
            fix = "pass a comparison, for example `condition > 0`"
            raise unusable(TypeError, name, "condition", required=required, got=condition, fix=fix)
    stopped = ops.cast(broadcastable("stop_gradient_if", "condition", condition, x), "bool")

    def rule(upstream: Any) -> Any:
        return None, ops.where(stopped, ops.zeros_like(upstream), upstream)

    return x, rule


@with_python_numbers("value", "norm", "axis")
@op_custom_gradient(name="multigrad>clip_gradient")
def clip_gradient(
    x: Tensor,
    *,
    value: float | None = None,
    norm: float | None = None,
    axis: int | tuple[int, ...] | None = None,
) -> Pair:
    """Return `x`, and clip its gradient.

    ```python
    from multigrad import grad, ops

    def loss(x):
        return ops.sum(ops.array([3.0, 4.0]) * ops.clip_gradient(x, norm=1.0))

    print(grad(loss)(ops.array([1.0, 2.0])))  # [0.6, 0.8]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        value: the largest absolute value of an element of the gradient.
        norm: the largest Euclidean norm of the gradient. A gradient with a larger norm is scaled down.
        axis: the axes over which the norm is computed. The default is all axes.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `clip(u, -value, value)`, or
        `u * min(1, norm / |u|)`. With a `keras.optimizers.LossScaleOptimizer`, `u` is the gradient of the
        scaled loss, so there is a warning under the policy "mixed_float16".

    Raises:
        NotImplementedError: in forward mode, because the gradient is not linear in `u`.
        TypeError: if `x` is complex.
        ValueError: unless exactly one of `value` and `norm` is given and positive; if `x` does not have the
            axes.

    References:
        Pascanu, Mikolov and Bengio 2013, On the difficulty of training recurrent neural networks,
        arXiv:1211.5063.
    """
    bound = clip_bound(value, norm)
    x = tensor_of("clip_gradient", "x", x)
    check_axes("clip_gradient", x, axis)
    if dtype_of(x).startswith("complex"):
        required, fix = "a real floating dtype", "clip the gradients of the real and imaginary parts"
        raise unusable(TypeError, "clip_gradient", "x", required=required, got=x, fix=fix)
    if keras.config.dtype_policy().name == "mixed_float16":
        warnings.warn(_LOSS_SCALING, stacklevel=1)  # Python shows a warning once for each line of code

    def rule(upstream: Any) -> Any:
        if FORWARD_MODE:
            raise NotImplementedError(_FORWARD_MODE)
        if norm is not None:
            return _clip_norm(upstream, bound, axis)
        limit = cast(bound, dtype_of(upstream))
        return ops.clip(upstream, -limit, limit)

    return x, rule


_FORWARD_MODE = message(
    "clip_gradient",
    "forward mode transposes the rule, which is not linear",
    required="reverse mode, such as grad, vjp or jacobian",
    got="forward mode, such as jvp",
    fix="use reverse mode, or call clip_gradient outside of the function that is differentiated",
    see="limits#nonlinear-rules",
)

_LOSS_SCALING = message(
    "clip_gradient",
    "under this policy, `fit` scales the loss by 32,768 at first, and the scaled gradient is clipped",
    required="a gradient of the loss itself",
    got="the policy 'mixed_float16'",
    fix="use the policy 'mixed_bfloat16', or compile the model with auto_scale_loss=False",
    see="mixed-precision#loss-scaling",
)


def clip_bound(value: float | None, norm: float | None) -> float:
    """Return the bound: `value` or `norm`."""
    given = [bound for bound in (value, norm) if bound is not None]
    if len(given) != 1 or not is_number(given[0]) or not given[0] > 0.0:
        problem = "the bound for the gradient is invalid"
        required = "either `value` or `norm`, a positive Python or NumPy number"
        got = f"value={value!r}, norm={norm!r}"
        fix = "write clip_gradient(x, norm=1.0), for example"
        raise ValueError(message("clip_gradient", problem, required=required, got=got, fix=fix))
    return given[0]


def _clip_norm(x: Any, norm: float, axis: Any) -> Any:
    # Divided by the largest element, because squares of large elements overflow and of small ones underflow.
    if 0 in tuple(x.shape):
        return x
    dtype = dtype_of(x)
    x = ops.cast(x, wide_dtype(dtype))  # because the sum of 65,505 squares of 1 overflows float16
    largest = ops.amax(ops.abs(x), axis=axis, keepdims=True)
    # Divided twice by the square root: XLA may multiply by the inverse, which underflows for the largest
    # numbers. No third division, because XLA divides once by the product of all, which may overflow.
    root = ops.sqrt(ops.where(largest > 0.0, largest, ops.ones_like(largest)))
    unit = x / root / root
    squared = ops.sum(unit * unit, axis=axis, keepdims=True)
    # The derivative of the square root at zero is infinite, and would be NaN in the branch that is not
    # selected.
    length = ops.sqrt(ops.where(largest > 0.0, squared, ops.ones_like(squared)))
    clipped = ops.where(length * largest <= norm, x, unit * (norm / length))  # infinite elements become NaN
    return ops.cast(clipped, dtype)


@op_custom_gradient(name="multigrad>prevent_gradient")
def prevent_gradient(x: Tensor, reason: str = "") -> Pair:
    """Return `x`, and raise if its gradient is computed.

    ```python
    from multigrad import grad, ops

    try:
        grad(lambda x: ops.prevent_gradient(x, "labels have no gradient"))(2.0)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    # prevent_gradient: labels have no gradient
    ```

    Arguments:
        x: a tensor of any shape and dtype.
        reason: why `x` has no gradient, for the message of the error.

    Returns:
        `x`.

    Raises:
        RuntimeError: if a gradient of `x` is computed, in the backward pass or when it is traced. TensorFlow
            computes all gradients on a tape, so it raises an error even if `x` comes from a frozen layer.

    References:
        TensorFlow's `tf.raw_ops.PreventGradient`.
    """

    def rule(upstream: Any) -> Any:
        problem = reason or "a gradient is computed where it was prevented"
        required = "a function that is not differentiated with respect to 'x'"
        got = f"an upstream gradient, {describe(upstream)}"
        fix = "use keras.ops.stop_gradient for a gradient of zero"
        raise RuntimeError(message("prevent_gradient", problem, required=required, got=got, fix=fix))

    return tensor_of("prevent_gradient", "x", x), rule


@op_custom_gradient(name="multigrad>print_gradient")
def print_gradient(x: Tensor, label: str = "gradient") -> Pair:
    """Return `x`, and print a summary of its gradient, in eager and compiled code.

    ```python
    from multigrad import grad, ops

    grad(lambda x: 3.0 * ops.print_gradient(x, "dL/dx"))(2.0)
    # dL/dx: shape (), mean 3, largest 3
    ```

    `trace_gradients` shows more about all ops, and has no overhead when it is not active.

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        label: the beginning of the printed line.

    Returns:
        `x`. The gradient is the upstream gradient.

    Raises:
        TypeError: if `x` is not a tensor.
        Exception: in code that TensorFlow's XLA compiles, which cannot call Python. The error names the node
            `callback_cannot_run_with_jit_compile`. `torch.compile` breaks the graph.

    References:
        `torch.Tensor.register_hook`.
    """

    def show(u: Any) -> None:
        u = u.astype(np.result_type(u.dtype, "float32"))  # NumPy 1 cannot format the mean of bfloat16
        mean = u.sum() / max(1, u.size)
        print(f"{label}: shape {u.shape}, mean {mean:.6g}, largest {abs(u).max(initial=0.0):.6g}")

    return tensor_of("print_gradient", "x", x), lambda upstream: backend.active.watch(show, upstream)


def broadcastable(op: str, argument: str, factor: Any, x: Any) -> Any:
    """Return an argument that must broadcast to the shape of `x`, as a number or tensor.

    Otherwise the output would have another shape than `x`, and the upstream gradient would not fit `x`. For
    the same reason, the argument must be real if `x` is.
    """
    factor = factor if isinstance(factor, (int, float, complex)) else tensor_of(op, argument, factor)
    dtypes = [dtype_of(v) if hasattr(v, "dtype") else type(v).__name__ for v in (factor, x)]
    if dtypes[0].startswith("complex") and not dtypes[1].startswith("complex"):
        required, fix = "a real number or tensor, because 'x' is real", "pass its real part"
        raise unusable(TypeError, op, argument, required=required, got=factor, fix=fix)
    shape, x_shape = [backend.active.sizes(getattr(v, "shape", ())) for v in (factor, x)]
    if shape is None or x_shape is None:
        return factor  # TensorFlow knows its rank only when the graph runs
    pairs = zip(reversed(shape), reversed(x_shape), strict=False)
    if len(shape) > len(x_shape) or any(None not in (a, b) and a not in (1, b) for a, b in pairs):
        required = f"a number, or a tensor of a shape that broadcasts to that of 'x', {shape_text(x_shape)}"
        fix = "reshape it to a shape that broadcasts"
        raise unusable(ValueError, op, argument, required=required, got=factor, fix=fix)
    return factor
