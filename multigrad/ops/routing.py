"""Ops that pass their input on as it is, and something else than the upstream gradient back."""

from typing import Any

from keras import ops

from multigrad import backend
from multigrad.core.errors import describe, message, shape_text, unusable
from multigrad.core.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, check_axes, is_number, tensor_of, with_plain
from multigrad.ops.dtypes import cast, dtype_of, exact


@op_custom_gradient(name="multigrad>scale_gradient")
def scale_gradient(x: Tensor, scale: float | Tensor) -> Pair:
    """Pass `x` on, and its gradient multiplied by `scale`.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 5.0 * ops.scale_gradient(x, 0.1))(2.0))  # 0.5
    ```

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        scale: a number, or a tensor or Variable that broadcasts to the shape of `x`. It has no gradient.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `scale * u`.

    References:
        Schrittwieser et al. 2020, Mastering Atari, Go, Chess and Shogi by Planning with a Learned Model,
        arXiv:1911.08265, which halves the gradient of a recurrent step in this way.
    """
    x = tensor_of("scale_gradient", "x", x)
    factor = fitting("scale_gradient", "scale", scale, x)
    return x, lambda upstream: (_times(upstream, factor), None)


@op_custom_gradient(name="multigrad>reverse_gradient")
def reverse_gradient(x: Tensor, scale: float | Tensor = 1.0) -> Pair:
    """Pass `x` on, and the negative of its gradient, by which what precedes is trained against what follows.

    ```python
    from multigrad import grad, ops

    print(grad(lambda x: 5.0 * ops.reverse_gradient(x))(2.0))  # -5.0
    ```

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        scale: a factor, lambda in the paper: a number, or a tensor or Variable that broadcasts to the shape
            of `x`, such as one that grows during training. It has no gradient.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `-scale * u`.

    References:
        Ganin and Lempitsky 2015, Unsupervised Domain Adaptation by Backpropagation, arXiv:1409.7495.
    """
    x = tensor_of("reverse_gradient", "x", x)
    factor = fitting("reverse_gradient", "scale", scale, x)
    return x, lambda upstream: (-_times(upstream, factor), None)


def _times(upstream: Any, factor: Any) -> Any:
    """Their product; of half precision by float32, in which a small factor is what it is."""
    dtype = dtype_of(upstream)
    wide = exact(dtype)
    return ops.cast(ops.cast(upstream, wide) * cast(factor, wide), dtype)


@op_custom_gradient(name="multigrad>stop_gradient_if")
def stop_gradient_if(condition: bool | Tensor, x: Tensor) -> Pair:
    """Pass `x` on, and its gradient where the condition is false.

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
        gradient that is NaN or infinite there does not come through.

    Raises:
        TypeError: when the condition is not of dtype bool.
        ValueError: when its shape does not broadcast to that of `x`.

    References:
        `keras.ops.stop_gradient`, of which this is the choice by element.
    """
    x = tensor_of("stop_gradient_if", "x", x)
    if not isinstance(condition, bool):
        condition = tensor_of("stop_gradient_if", "condition", condition)
        if dtype_of(condition) != "bool":
            required, fix = "a bool, or a tensor of dtype bool", "compare it, as in `condition > 0`"
            raise unusable(
                TypeError, "stop_gradient_if", "condition", required=required, got=condition, fix=fix
            )
    stopped = ops.cast(fitting("stop_gradient_if", "condition", condition, x), "bool")

    def rule(upstream: Any) -> Any:
        return None, ops.where(stopped, ops.zeros_like(upstream), upstream)

    return x, rule


@with_plain("value", "norm", "axis")
@op_custom_gradient(name="multigrad>clip_gradient")
def clip_gradient(
    x: Tensor,
    *,
    value: float | None = None,
    norm: float | None = None,
    axis: int | tuple[int, ...] | None = None,
) -> Pair:
    """Pass `x` on, and its gradient clipped.

    ```python
    from multigrad import grad, ops

    def loss(x):
        return ops.sum(ops.array([3.0, 4.0]) * ops.clip_gradient(x, norm=1.0))

    print(grad(loss)(ops.array([1.0, 2.0])))  # [0.6, 0.8]
    ```

    Arguments:
        x: a tensor of any shape, of a real floating dtype.
        value: the largest absolute value of an element of the gradient.
        norm: the largest Euclidean norm of the gradient, of which a larger one is scaled down to it.
        axis: the axes along which the norm is taken; all of them if not given.

    Returns:
        `x`. For an upstream gradient `u`, the gradient is `clip(u, -value, value)`, or
        `u * min(1, norm / |u|)`. It is not linear in `u`, so it has no forward mode. With a
        `keras.optimizers.LossScaleOptimizer`, `u` is that of the scaled loss.

    Raises:
        TypeError: where `x` is complex.
        ValueError: unless one of `value` and `norm` is given, and is positive; or where `x` has no such axis.

    References:
        Pascanu, Mikolov and Bengio 2013, On the difficulty of training recurrent neural networks,
        arXiv:1211.5063.
    """
    bound = bound_of(value, norm)
    x = tensor_of("clip_gradient", "x", x)
    check_axes("clip_gradient", x, axis)
    if dtype_of(x).startswith("complex"):
        required, fix = "a real floating dtype", "clip the gradients of its real and its imaginary part"
        raise unusable(TypeError, "clip_gradient", "x", required=required, got=x, fix=fix)
    if norm is None:
        return x, lambda upstream: _clip_value(upstream, cast(bound, dtype_of(upstream)))
    return x, lambda upstream: _clip_norm(upstream, bound, axis)


def bound_of(value: float | None, norm: float | None) -> float:
    """The one of the two that is given."""
    given = [bound for bound in (value, norm) if bound is not None]
    if len(given) != 1 or not is_number(given[0]) or not given[0] > 0.0:
        raise ValueError(
            message(
                "clip_gradient",
                "there is no bound to clip the gradient to",
                required="either `value` or `norm`, a positive number of Python's or NumPy's",
                got=f"value={value!r}, norm={norm!r}",
                fix="write clip_gradient(x, norm=1.0), for example",
            )
        )
    return given[0]


def _clip_value(x: Any, bound: Any) -> Any:
    return ops.clip(x, -bound, bound)


def _clip_norm(x: Any, norm: float, axis: Any) -> Any:
    # By the largest element first: squares of large ones overflow, and of small ones vanish.
    if 0 in tuple(x.shape):
        return x
    dtype = dtype_of(x)
    x = ops.cast(x, exact(dtype))  # squares of 65,505 ones have no sum in float16
    largest = ops.amax(ops.abs(x), axis=axis, keepdims=True)
    # Twice by a root: XLA may multiply by the inverse, which vanishes for the largest numbers there are. And
    # not a third time, because it divides once, by the product of all, which may be infinite.
    root = ops.sqrt(ops.where(largest > 0.0, largest, ops.ones_like(largest)))
    unit = x / root / root
    squared = ops.sum(unit * unit, axis=axis, keepdims=True)
    # Of a zero the root has no derivative, and with it what is not chosen would have none.
    length = ops.sqrt(ops.where(largest > 0.0, squared, ops.ones_like(squared)))
    clipped = ops.where(length * largest <= norm, x, unit * (norm / length))  # what is infinite becomes NaN
    return ops.cast(clipped, dtype)


@op_custom_gradient(name="multigrad>prevent_gradient")
def prevent_gradient(x: Tensor, reason: str = "") -> Pair:
    """Pass `x` on, and make it an error to differentiate by it.

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
        reason: why there is to be no gradient, for the error.

    Returns:
        `x`.

    Raises:
        RuntimeError: where a gradient comes back to it: in the backward pass, or when that is traced. On
            TensorFlow, whose tapes ask for every gradient, also where nothing before `x` is trained, such as
            behind a frozen layer.

    References:
        TensorFlow's `tf.raw_ops.PreventGradient`.
    """

    def rule(upstream: Any) -> Any:
        raise RuntimeError(_prevented(reason, upstream))

    return tensor_of("prevent_gradient", "x", x), rule


def _prevented(reason: str, upstream: Any) -> str:
    return message(
        "prevent_gradient",
        reason or "there is to be no gradient by what was passed through it",
        required="a function that is not differentiated by it",
        got=f"an upstream gradient, {describe(upstream)}",
        fix="use keras.ops.stop_gradient where the gradient is to be zero",
    )


@op_custom_gradient(name="multigrad>print_gradient")
def print_gradient(x: Tensor, label: str = "gradient") -> Pair:
    """Pass `x` and its gradient on, and print what comes back, compiled or not.

    ```python
    from multigrad import grad, ops

    grad(lambda x: 3.0 * ops.print_gradient(x, "dL/dx"))(2.0)
    # dL/dx: shape (), mean 3, largest 3
    ```

    `trace_gradients` shows more, of all ops, and costs nothing outside of it.

    Arguments:
        x: a tensor of any shape, of a floating or complex dtype.
        label: what stands at the beginning of the line.

    Returns:
        `x`. The gradient is the upstream gradient.

    References:
        `torch.Tensor.register_hook`, by which a gradient is looked at in PyTorch.
    """

    def show(u: Any) -> None:
        print(f"{label}: shape {u.shape}, mean {u.mean():.6g}, largest {abs(u).max(initial=0.0):.6g}")

    def rule(upstream: Any) -> Any:
        backend.active.observe(show, [upstream])
        return upstream

    return tensor_of("print_gradient", "x", x), rule


def fitting(op: str, argument: str, factor: Any, x: Any) -> Any:
    """The factor, condition, end of a range or size of a step, whose shape must broadcast to that of `x`.

    A gradient by `x` that it made larger would be none. And by a complex factor, one of a real `x` would be.
    """
    factor = factor if isinstance(factor, (int, float, complex)) else tensor_of(op, argument, factor)
    kinds = [dtype_of(v) if hasattr(v, "dtype") else type(v).__name__ for v in (factor, x)]
    if kinds[0].startswith("complex") and not kinds[1].startswith("complex"):
        required, fix = "a real number or tensor, as 'x' is real", "pass its real part"
        raise unusable(TypeError, op, argument, required=required, got=factor, fix=fix)
    shape, whole = [backend.active.sizes(getattr(v, "shape", ())) for v in (factor, x)]
    if shape is None or whole is None:
        return factor  # of a rank that TensorFlow knows only when the graph runs
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    if len(shape) > len(whole) or any(None not in (a, b) and a not in (1, b) for a, b in pairs):
        raise ValueError(
            message(
                op,
                "its shape does not broadcast to that of what is passed through",
                argument=f"{argument!r}",
                required=f"a number, or a tensor of a shape that broadcasts to {shape_text(whole)}",
                got=describe(factor),
                fix="bring it into a shape with one element for each element of 'x', or fewer",
            )
        )
    return factor
