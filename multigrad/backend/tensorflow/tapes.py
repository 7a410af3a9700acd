"""Record rules on TensorFlow's tapes and in its forward mode."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Run
from multigrad.backend.tensorflow.private import (
    could_possibly_record,
    pack_tangents,
    push_forwardprop_state,
    record_operation_backprop_only,
    record_operation_forwardprop_only,
    stop_recording,
)
from multigrad.backend.tensorflow.tensors import is_differentiable
from multigrad.core.errors import message


def record_rule(
    name: str,
    run: Run,
    outputs: Sequence[Any],
    residuals: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
) -> None:
    """Record `backward` as the gradient of `outputs`, and the transpose of `forward` for forward mode.

    `forward` takes copies of the residuals before the upstream gradients. The tapes record first, because
    forward mode runs the rule, which may use tensors in `outputs`.
    """
    inputs = list(run.inputs)
    record_operation_backprop_only(_TYPE, outputs, inputs, backward)
    calls: list[bool] = []
    copied = functools.partial(_on_copies, name, run.is_opaque, forward, residuals, calls)
    record_operation_forwardprop_only(_TYPE, outputs, inputs, copied, None)
    if calls and tf.executing_eagerly():
        # A tape (TensorFlow 2.21) counts the uses of a tensor, and drops its record when the count is zero.
        # Forward mode uses the results of an operation before the tape records them, which resets the count.
        # The count then reaches zero when the tangent of the tensor is freed, although another derivative
        # uses the tensor. Keeping the tangents alive prevents this.
        _keep(inputs, backward, pack_tangents(residuals).tangents)


def _keep(inputs: Sequence[Any], *objects: Any) -> None:
    """Keep `objects` alive for as long as the active tapes that watch `inputs`."""
    with stop_recording():
        key = tf.constant(0.0)
    # A later record of the same tensor replaces the first one, which stays alive and is never used.
    for kept in objects, ():
        record_operation_backprop_only(_TYPE, [key], inputs, functools.partial(_no_gradients, kept))


def _no_gradients(kept: Sequence[Any], *upstream: Any) -> Sequence[Any]:
    raise AssertionError(f"a gradient was computed for the record that keeps {kept!r} alive")


# The type of the recorded operation. Tapes treat some types of TensorFlow specially.
_TYPE = "Multigrad"


def _on_copies(
    name: str,
    is_opaque: bool,
    forward: Callable[..., Sequence[Any]],
    residuals: Sequence[Any],
    calls: list[bool],
    *upstream: Any,
) -> Sequence[Any]:
    """Call `forward` on copies of the residuals, for forward mode. Append an item to `calls`.

    While an accumulator transposes the rule, tapes that began after it record nothing. In a new state of the
    accumulator, they record, so the rule can compute gradients. The accumulator then gets the results as one
    operation. The copies have no tangents in the new state, so the accumulator records nothing else. An
    object may hold tensors that have tangents, so the state is kept for a rule that uses one.
    """
    calls.append(True)
    if is_opaque:
        token = _TRANSPOSED.set(name)
        try:
            return forward(residuals, *upstream)
        finally:
            _TRANSPOSED.reset(token)
    copies = [tf.identity(tensor) if is_differentiable(tensor) else tensor for tensor in residuals]
    sources = [tensor for tensor in upstream if is_differentiable(tensor)]
    with push_forwardprop_state(), tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        gradients = [g if g is None else tf.identity(g) for g in forward(copies, *upstream)]
    results = [gradient for gradient in gradients if gradient is not None]

    def transpose(*tangents: Any) -> Sequence[Any]:
        with push_forwardprop_state():
            return list(tape.gradient(results, sources, tangents, tf.UnconnectedGradients.ZERO))

    record_operation_forwardprop_only(_TYPE, results, sources, transpose, None)
    return gradients


# The name of the op whose rule an accumulator (TensorFlow 2.21) transposes without a new state.
_TRANSPOSED: contextvars.ContextVar[str | None] = contextvars.ContextVar("transposed", default=None)


def require_tapes() -> None:
    """Raise where a gradient would be zero, because no tape records."""
    name = _TRANSPOSED.get()
    if name is not None:
        raise NotImplementedError(
            message(
                name,
                "in forward mode on TensorFlow, the rule computes a gradient and uses an object",
                required="a rule that calls no gradient function, directly or in an op, or uses no object",
                got="a rule that computes a gradient, and may get tensors from an object",
                fix="use multigrad.jvp, or reverse mode",
                see="tensorflow#forward-mode",
            )
        )


def may_record(tensors: Sequence[Any] | None = None) -> bool:
    return could_possibly_record()
