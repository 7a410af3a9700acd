"""What is told to TensorFlow's tapes, and to its forward mode."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# Private: TensorFlow (2.21) has no public name for recording an operation with a gradient of one's own on
# the active tapes, except through the registry that keeps graphs alive; and none for its record of the
# variables that are read, which is how `tf.custom_gradient` knows them, nor for what all active accumulators
# hold.
from tensorflow.python.eager import forwardprop_util, record

from multigrad.backend.tensorflow.tensors import concrete, is_differentiable
from multigrad.core.errors import message
from multigrad.core.linearity import FAR, require_linear, trial

VariableWatcher, stop_recording = record.VariableWatcher, record.stop_recording


def record_rule(
    name: str,
    own: Sequence[Any],
    inputs: Sequence[Any],
    residuals: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
) -> None:
    """Give `own` its gradient on the tapes, and by the transpose of `forward` a derivative in forward mode.

    The tapes come first: the derivative is computed from the rule, which may use what is in `own`.
    """
    record.record_operation_backprop_only(_TYPE, own, inputs, backward)
    asked: list[bool] = []
    record.record_operation_forwardprop_only(
        _TYPE, own, inputs, functools.partial(_linear_backward, name, forward, asked), None
    )
    if asked and tf.executing_eagerly():
        # A tape (TensorFlow 2.21) forgets where a tensor came from when no use of it is left that it counted.
        # Forward mode uses what an operation returns before the tape is told of that, which sets its count
        # back: it comes to its end when the derivative of the tensor is gone, though another derivative was
        # computed from the tensor. Derivatives that stay take no use back.
        _keep(inputs, backward, forwardprop_util.pack_tangents(list(residuals)).tangents)


def _keep(inputs: Sequence[Any], *objects: Any) -> None:
    """Let `objects` stay for as long as the active tapes that watch `inputs` do."""
    with stop_recording():
        key = tf.constant(0.0)
    # What a later record of the same tensor takes the place of stays, and is never asked.
    for kept in objects, ():
        record.record_operation_backprop_only(_TYPE, [key], inputs, functools.partial(_no_gradients, kept))


def _no_gradients(kept: Sequence[Any], *upstream: Any) -> Sequence[Any]:
    raise AssertionError(f"no gradient is asked of what keeps {kept!r}")


# The type of operation that a tape is told of. It treats some of TensorFlow's own in a way of their own.
_TYPE = "Multigrad"


def _linear_backward(
    name: str, backward: Callable[..., Sequence[Any]], asked: list[bool], *upstream: Any
) -> Sequence[Any]:
    """`backward`, seen to be linear where values are at hand. It notes that it was asked."""
    asked.append(True)
    token = _TRANSPOSED.set(name)
    try:
        if tf.executing_eagerly():
            with stop_recording():
                floating = [u is not None and is_differentiable(u) for u in upstream]
                pairs = list(zip(upstream, floating, strict=True))
                tried = [tf.constant(trial(u.shape), u.dtype) if f else u for u, f in pairs]
                further = [FAR * u if f else u for u, f in zip(tried, floating, strict=True)]
                near, far = backward(*tried), backward(*further)
                require_linear(name, near, far, concrete)
        return backward(*upstream)
    finally:
        _TRANSPOSED.reset(token)


# The op whose rule is transposed here for forward mode, in which TensorFlow (2.21) records on no tape.
_TRANSPOSED: contextvars.ContextVar[str | None] = contextvars.ContextVar("transposed", default=None)


def require_tapes() -> None:
    """See that a gradient can be taken here; it would be zero."""
    name = _TRANSPOSED.get()
    if name is not None:
        raise NotImplementedError(
            message(
                name,
                "its rule takes a gradient, for which TensorFlow has no forward mode",
                required="a rule of operations and of ops",
                got="one that calls a gradient function, itself or in an op",
                fix="take the derivative by multigrad.jvp, or in reverse mode",
                see="tensorflow#forward-mode",
            )
        )


def may_record() -> bool:
    return record.could_possibly_record()


def needs_plain_rule() -> bool:
    return may_record()  # it is copied for a Jacobian, and in forward mode there are no tapes


UNRECORDED = contextvars.ContextVar("unrecorded", default=False)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    token = UNRECORDED.set(True)
    try:
        with stop_recording():
            yield
    finally:
        UNRECORDED.reset(token)
