"""Record rules on TensorFlow's tapes and in its forward mode."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.private import (
    could_possibly_record,
    pack_tangents,
    record_operation_backprop_only,
    record_operation_forwardprop_only,
    stop_recording,
)
from multigrad.core.errors import message


def record_rule(
    name: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    residuals: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
) -> None:
    """Record `backward` as the gradient of `outputs`, and the transpose of `forward` for forward mode.

    The tapes record first, because forward mode runs the rule, which may use tensors in `outputs`.
    """
    record_operation_backprop_only(_TYPE, outputs, inputs, backward)
    calls: list[bool] = []
    record_operation_forwardprop_only(
        _TYPE, outputs, inputs, functools.partial(_transposed_backward, name, forward, calls), None
    )
    if calls and tf.executing_eagerly():
        # A tape (TensorFlow 2.21) counts the uses of a tensor, and drops its record when the count is zero.
        # Forward mode uses the results of an operation before the tape records them, which resets the count.
        # The count then reaches zero when the tangent of the tensor is freed, although another derivative
        # uses the tensor. Keeping the tangents alive prevents this.
        _keep(inputs, backward, pack_tangents(list(residuals)).tangents)


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


def _transposed_backward(
    name: str, backward: Callable[..., Sequence[Any]], calls: list[bool], *upstream: Any
) -> Sequence[Any]:
    """Call `backward`, which forward mode transposes. Append an item to `calls`."""
    calls.append(True)
    token = _TRANSPOSED.set(name)
    try:
        return backward(*upstream)
    finally:
        _TRANSPOSED.reset(token)


# The name of the op whose rule is transposed for forward mode, where TensorFlow (2.21) records on no tape.
_TRANSPOSED: contextvars.ContextVar[str | None] = contextvars.ContextVar("transposed", default=None)


def require_tapes() -> None:
    """Raise where a gradient would be zero, because no tape records."""
    name = _TRANSPOSED.get()
    if name is not None:
        raise NotImplementedError(
            message(
                name,
                "the rule computes a gradient, which TensorFlow does not support in forward mode",
                required="a rule that calls operations and ops only",
                got="a rule that calls a gradient function, directly or in an op",
                fix="use multigrad.jvp, or reverse mode",
                see="tensorflow#forward-mode",
            )
        )


def may_record() -> bool:
    return could_possibly_record()


def needs_plain_rule() -> bool:
    return may_record()  # TensorFlow copies rules for a Jacobian, and records no tapes in forward mode


UNRECORDED = contextvars.ContextVar("unrecorded", default=False)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    token = UNRECORDED.set(True)
    try:
        with stop_recording():
            yield
    finally:
        UNRECORDED.reset(token)
