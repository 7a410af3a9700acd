"""Record rules on TensorFlow's tapes and in its forward mode."""

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from multigrad.backend.base import Call, Run
from multigrad.backend.tensorflow.private import (
    HIGHER_ORDER,
    could_possibly_record,
    pack_tangents,
    possible_gradient_types,
    push_forwardprop_state,
    record_operation_backprop_only,
    record_operation_forwardprop_only,
    stop_recording,
)
from multigrad.backend.tensorflow.tensors import is_differentiable
from multigrad.core.closure import restore
from multigrad.core.errors import message
from multigrad.core.reachable import reachable_tensors
from multigrad.core.type_sets import TypeSet


def record_rule(
    name: str,
    run: Run,
    outputs: Sequence[Any],
    residuals: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
    host_calls: Sequence[Any] | None,
) -> None:
    """Record `backward` as the gradient of `outputs`, and the transpose of `forward` for forward mode.

    `forward` takes copies of the residuals before the upstream gradients. The tapes record first, because
    forward mode runs the rule, which may use tensors in `outputs`. `host_calls` are the results of
    `run_noting_host_calls`.
    """
    inputs = list(run.inputs)
    record_operation_backprop_only(_TYPE, outputs, inputs, backward)
    if host_calls is None:
        return
    if host_calls:
        _require_no_tangents(name, run, host_calls)
    calls: list[bool] = []
    # Not in `_on_copies`: an accumulator that calls it returns no tangents.
    keeps_state = run.is_opaque and bool(pack_tangents(inputs).tangents) and _has_tangents_in_objects(run)
    copied = functools.partial(_on_copies, name, keeps_state, forward, residuals, calls)
    record_operation_forwardprop_only(_TYPE, outputs, inputs, copied, None)
    if calls and tf.executing_eagerly():
        # A tape (TensorFlow 2.21) counts the uses of a tensor, and drops its record when the count is zero.
        # Forward mode uses the results of an operation before the tape records them, which resets the count.
        # The count then reaches zero when the tangent of the tensor is freed, although another derivative
        # uses the tensor. Keeping the tangents alive prevents this.
        _keep(inputs, backward, pack_tangents(residuals).tangents)


# The tensors that the function of the innermost op passed to host code: itself, and in calls of `host_call`.
_HOST_CALLS: contextvars.ContextVar[tuple[list[Any], list[Any]] | None] = contextvars.ContextVar(
    "host_calls", default=None
)


def note_host_call(tensors: Sequence[Any]) -> None:
    """Note the tensors that the function of an op passes to host code."""
    frame = _HOST_CALLS.get()
    if frame is not None:
        frame[0].extend(tensors)


def run_noting_host_calls(call: Call, tensors: Sequence[Any]) -> tuple[Run, Sequence[Any] | None]:
    """Run the function. Also return the arguments of calls of `host_call` in it.

    They are None for a `host_call` in the function of another op. Forward mode does not record it: it would
    compute its derivative at once, which does not exist, although the rule of the other op replaces it.
    """
    outer = _HOST_CALLS.get()
    frame: tuple[list[Any], list[Any]] = [], []
    token = _HOST_CALLS.set(frame)
    try:
        run = call.run(tensors)
    finally:
        _HOST_CALLS.reset(token)
    if frame[0] and outer is not None:
        outer[1].extend(frame[0])
        return run, None
    return run, frame[1]


def _require_no_tangents(name: str, run: Run, host_calls: Sequence[Any]) -> None:
    """Raise if another derivative may need the tangents of residuals that a host call may have computed."""
    stored = any([isinstance(tensor, tf.Tensor) for tensor in _tensors_in_objects(run)])
    may_need = stored or any(map(is_differentiable, run.others()))
    if not (may_need and pack_tangents(list(host_calls)).tangents):
        return
    if possible_gradient_types([*run.inputs, *host_calls]) == HIGHER_ORDER:
        raise NotImplementedError(
            message(
                name,
                "in a derivative of forward mode on TensorFlow, the rule may use a result of host_call",
                required="a rule that uses only inputs and outputs of a function that calls host_call",
                got="an intermediate result or an object in the rule",
                fix="compute the intermediate result in the rule, by an op with a rule of its own",
                see="tensorflow#forward-mode",
            )
        )


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
    keeps_state: bool,
    forward: Callable[..., Sequence[Any]],
    residuals: Sequence[Any],
    calls: list[bool],
    *upstream: Any,
) -> Sequence[Any]:
    """Call `forward` on copies of the residuals, for forward mode. Append an item to `calls`.

    While an accumulator transposes the rule, tapes that began after it record nothing. In a new state of the
    accumulator, they record, so the rule can compute gradients. The accumulator then gets the results as one
    operation. The copies have no tangents in the new state, so the accumulator records nothing else. The
    state is kept for a rule that uses an object that holds tensors with tangents.
    """
    calls.append(True)
    if keeps_state:
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


_HELD = TypeSet(tf.Tensor, tf.Variable)


def _tensors_in_objects(run: Run) -> Iterator[Any]:
    """Yield the tensors and variables that the rule reaches through objects."""
    without_residuals = restore(run.template, [None] * len(run.residuals))
    return reachable_tensors(without_residuals, _HELD, (keras.Layer, keras.Variable, tf.Module))


def _has_tangents_in_objects(run: Run) -> bool:
    reached = _tensors_in_objects(run)
    return bool(pack_tangents([t.handle if isinstance(t, tf.Variable) else t for t in reached]).tangents)


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
                required="objects without tangents, or a rule that calls no gradient function",
                got="a rule that computes a gradient, and an object that holds a tensor with a tangent",
                fix="let the rule close over the tensor, or use multigrad.jvp or reverse mode",
                see="tensorflow#forward-mode",
            )
        )


def may_record(tensors: Sequence[Any] | None = None) -> bool:
    return could_possibly_record()
