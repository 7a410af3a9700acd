"""Record rules on TensorFlow's tapes and in its forward mode."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from multigrad.backend.base import Call, Rule, Run
from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.tensors import TENSORS, is_differentiable
from multigrad.common.closure import OTHER
from multigrad.common.errors import closed_over_error, held_error, message
from multigrad.common.reachable import reachable_tensors


def record_rule(
    name: str,
    rule: Rule,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    residuals: Sequence[Any],
    backward: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
    host_calls: Sequence[Any] | None,
    marker: Any,
) -> None:
    """Record `backward` as the gradient of `outputs`, and the transpose of `forward` for forward mode.

    `forward` takes copies of the residuals before the upstream gradients. The tapes record first, because
    forward mode runs the rule, which may use tensors in `outputs`. `host_calls` and `marker`
    are results of `run_function`.
    """
    inputs = list(inputs)
    if marker is None:
        private.record_operation_backprop_only(_TYPE, outputs, inputs, backward)
    else:
        private.record_operation_backprop_only(
            _TYPE, outputs, [*inputs, marker], lambda *upstream: [*backward(*upstream), tf.zeros(0)]
        )
    if host_calls is None:
        return
    if host_calls:
        _require_no_tangents(name, rule, inputs, residuals, host_calls)
    if rule.is_opaque and _have_tangents(inputs) and _have_tangents(_held_tensors(rule)):
        raise TypeError(held_error(name))
    calls: list[bool] = []
    # Not in `_on_copies`: an accumulator that calls it returns no tangents.
    copied = functools.partial(_on_copies, forward, residuals, calls)
    private.record_operation_forwardprop_only(_TYPE, outputs, inputs, copied, None)
    if calls and tf.executing_eagerly():
        # A tape (TensorFlow 2.21) counts the uses of a tensor, and drops its record when the count is zero.
        # Forward mode uses the results of an operation before the tape records them, which resets the count.
        # The count then reaches zero when the tangent of the tensor is freed, although another derivative
        # uses the tensor. Keeping the tangents alive prevents this.
        _keep(inputs, backward, private.pack_tangents(residuals).tangents)


def run_function(call: Call, tensors: Sequence[Any]) -> tuple[Run, Sequence[Any] | None, Any, Sequence[Any]]:
    """Run the function.

    Returns:
        the run, the arguments of calls of `host_call` in it, a tensor whose gradient raises an error if an
        output depends on a differentiated tensor that is not an input, None if no output does, and the
        tensors that the function could reach before it ran and that a tape watches.
    """
    watched = _watched_tensors(call) if may_record() else ()
    if not watched:
        return *_run_noting_host_calls(call, tensors), None, ()
    # An argument that is closed over, too, becomes another tensor, because tapes know tensors by identity.
    copies = [tf.identity(x) if any([x is tensor for tensor in watched]) else x for x in tensors]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        local = _captured(watched)
        tape.watch(local)
        run, host_calls = _run_noting_host_calls(call, copies)
    with private.stop_recording():
        gradients = tape.gradient([o for o in run.outputs if is_differentiable(o)], local)
        marker = tf.zeros(0)
    triples = [*zip(watched, local, gradients, strict=True)]
    used = [tensor for tensor, _, gradient in triples if gradient is not None]
    if not used or call.answers_for_outer_rule([*tensors, *run.inputs]):
        return run, host_calls, None, watched
    error = closed_over_error(call.name, call.closed_over_path(lambda found: any([found is t for t in used])))
    # The gradient of a loop, a branch or a tf.function does not use the records of tapes outside of it.
    is_outer = any([tensor is not inner and gradient is not None for tensor, inner, gradient in triples])
    if is_outer or _have_tangents(used):
        raise TypeError(error)
    private.record_operation_backprop_only(_TYPE, [marker], used, functools.partial(_raise, error))
    return run, host_calls, marker, watched


def _captured(tensors: Sequence[Any]) -> list[Any]:
    """Return the tensors as the graph that is being built captures them from outer graphs and eager code."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "capture"):
        return list(tensors)
    return [t if getattr(t, "graph", None) is graph else graph.capture(t) for t in tensors]


def _watched_tensors(call: Call) -> list[Any]:
    """Return the tensors that the function can reach, other than its arguments, and that a tape watches."""
    found = list(reachable_tensors(call.f, TENSORS))
    for obj in call.objects():
        for value in getattr(obj, "__dict__", {}).values():
            items = value.values() if isinstance(value, dict) else value
            # Not `+=`, which fails for the wrapped tuples of a layer (Keras 3.15).
            found.extend(items if isinstance(value, (list, tuple, dict)) else [value])
    tensors = [value for value in found if TENSORS[type(value)] and is_differentiable(value)]
    return [tensor for tensor in tensors if private.possible_gradient_types([tensor])]


def _raise(error: str, *upstream: Any) -> NoReturn:
    raise TypeError(error)


def _have_tangents(tensors: Sequence[Any]) -> bool:
    """Return whether a tensor has a tangent in forward mode."""
    return bool(private.pack_tangents(list(tensors)).tangents)


def _held_tensors(rule: Rule) -> list[Any]:
    return [tensor for tensor in rule.held() if TENSORS[type(tensor)]]


def require_no_history(name: str, rule: Rule, watched: Sequence[Any]) -> None:
    """Raise if a derivative of the gradient may need a tensor that the rule reaches through an object.

    `watched` are tensors that were there before the function ran, which the tapes differentiate.
    """
    for part in rule.held() if rule.is_opaque and may_record() else ():
        # An iterator may hold such a tensor.
        may_need = not TENSORS[type(part)] or private.possible_gradient_types([part])
        if may_need and not any([part is tensor for tensor in watched]):
            raise TypeError(held_error(name))


# The tensors that the function of the innermost op passed to host code: itself, and in calls of `host_call`.
_HOST_CALLS: contextvars.ContextVar[tuple[list[Any], list[Any]] | None] = contextvars.ContextVar(
    "host_calls", default=None
)


def note_host_call(tensors: Sequence[Any]) -> None:
    """Note the tensors that the function of an op passes to host code."""
    frame = _HOST_CALLS.get()
    if frame is not None:
        frame[0].extend(tensors)


def _run_noting_host_calls(call: Call, tensors: Sequence[Any]) -> tuple[Run, Sequence[Any] | None]:
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


def _require_no_tangents(
    name: str, rule: Rule, inputs: Sequence[Any], residuals: Sequence[Any], host_calls: Sequence[Any]
) -> None:
    """Raise if another derivative may need the tangents of residuals that a host call may have computed."""
    others = [residual for residual, role in zip(residuals, rule.roles, strict=True) if role == OTHER]
    may_need = _held_tensors(rule) or any(map(is_differentiable, others))
    if not (may_need and _have_tangents(host_calls)):
        return
    if private.possible_gradient_types([*inputs, *host_calls]) == private.HIGHER_ORDER:
        raise NotImplementedError(
            message(
                name,
                "in a derivative of forward mode on TensorFlow, the rule may use a result of host_call",
                required="a rule that uses only inputs and outputs of a function that calls host_call",
                got="an intermediate result or an object in the rule",
                fix="compute the intermediate result in the rule, by an op with a rule of its own",
                see="limits#forward-mode",
            )
        )


def _keep(inputs: Sequence[Any], *objects: Any) -> None:
    """Keep `objects` alive for as long as the active tapes that watch `inputs`."""
    with private.stop_recording():
        key = tf.constant(0.0)
    # A later record of the same tensor replaces the first one, which stays alive and is never used.
    for kept in objects, ():
        private.record_operation_backprop_only(_TYPE, [key], inputs, functools.partial(_no_gradients, kept))


def _no_gradients(kept: Sequence[Any], *upstream: Any) -> Sequence[Any]:
    raise AssertionError(f"a gradient was computed for the record that keeps {kept!r} alive")


# The type of the recorded operation. Tapes treat some types of TensorFlow specially.
_TYPE = "Multigrad"


def _on_copies(
    forward: Callable[..., Sequence[Any]], residuals: Sequence[Any], calls: list[bool], *upstream: Any
) -> Sequence[Any]:
    """Call `forward` on copies of the residuals, for forward mode. Append an item to `calls`.

    While an accumulator transposes the rule, tapes that began after it record nothing. In a new state of the
    accumulator, they record, so the rule can compute gradients. The accumulator then gets the results as one
    operation. The copies have no tangents in the new state, so the accumulator records nothing else.
    """
    calls.append(True)
    copies = [tf.identity(tensor) if is_differentiable(tensor) else tensor for tensor in residuals]
    sources = [tensor for tensor in upstream if is_differentiable(tensor)]
    with private.push_forwardprop_state(), tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        gradients = [g if g is None else tf.identity(g) for g in forward(copies, *upstream)]
    results = [gradient for gradient in gradients if gradient is not None]

    def transpose(*tangents: Any) -> Sequence[Any]:
        with private.push_forwardprop_state():
            return list(tape.gradient(results, sources, tangents, tf.UnconnectedGradients.ZERO))

    private.record_operation_forwardprop_only(_TYPE, results, sources, transpose, None)
    return gradients


def may_record(tensors: Sequence[Any] | None = None) -> bool:
    return private.could_possibly_record()
