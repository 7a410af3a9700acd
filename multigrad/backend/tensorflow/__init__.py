"""TensorFlow.

The native way to bind a custom derivative is `tf.custom_gradient`, whose function returns an output and
a closure. In a graph it registers each closure under a name of its own and for ever, so that the graph
of every `tf.function` that calls it outlives the function. Here what is registered knows the graph weakly,
and finds the rule on it; and what is recorded on the tapes is recorded as `tf.custom_gradient` does.

A SavedModel takes each rule with it, traced, under its name. The name is no other op's in any process: a
rule that was not saved is missed with an error, and not mistaken for another one.

The function itself is recorded too: a second derivative goes through what the rule closed over. Where
that is an output of the op, the rule is given the tied one, so that it stays in force.

Its rooms: `graphs.py` for the operation that carries a rule in a graph, `tapes.py` for what is recorded,
`variables.py` for those that a function reads, `gradients.py` for the calculus, `programs.py` for what is
compiled; they share `tensors.py`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend import Call, Pullback
from multigrad.backend.tensorflow.compiled_function import jit
from multigrad.backend.tensorflow.gradients import gradients_expected, jacobian, value_and_grad, vjp
from multigrad.backend.tensorflow.graphs import Carrier, captured, graph_here, is_nested, is_within
from multigrad.backend.tensorflow.host_call import host_call, host_code
from multigrad.backend.tensorflow.programs import compiled, program, uncompiled
from multigrad.backend.tensorflow.tapes import (
    VariableWatcher,
    may_record,
    needs_plain_rule,
    record_rule,
    stop_recording,
    unrecorded,
)
from multigrad.backend.tensorflow.tensors import (
    CONVERTIBLE,
    FOREIGN,
    STAND_INS,
    TENSORS,
    after,
    as_tensor,
    concrete,
    conform,
    is_compiling,
    is_differentiable,
    library_code,
    observe,
    sizes,
    specs_of,
)
from multigrad.backend.tensorflow.variables import Place, read_beside
from multigrad.backend.usual import (
    assign,
    constant,
    defaults_of,
    is_constant,
    is_reading_code,
    snapshot,
    wide,
)
from multigrad.closure import lift, restore


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    graph = graph_here()
    eager = graph is None
    with VariableWatcher() as watcher:
        outputs, rule, tensors, back = call.run(tensors, place=Place(call.name, watcher))
    if not outputs or (eager and not may_record()):
        return back.output.join(outputs)
    specs = specs_of(captured(tensors, graph))
    if not any(specs):
        return back.output.join([tf.stop_gradient(output) for output in outputs])  # of what it closes over
    residuals, template, _ = lift(rule, TENSORS, call.f)
    carrier = None if eager else Carrier(call.name, outputs, tensors, residuals)
    own = _own_eagerly(outputs) if carrier is None else carrier.outputs
    # An output that the rule uses is differentiated by the rule; one that is an input is the input.
    places: dict[int, Any] = {}
    for output, replacement in zip(outputs, own, strict=True):
        places.setdefault(id(output), replacement)
    places.update(zip(map(id, tensors), tensors, strict=True))
    tied = [places.get(id(residual), residual) for residual in residuals]
    tied_rule = restore(template, tied)
    # A gradient may be built in a graph beside the call's own, and finds in that what it takes: the gradient
    # of a branch or a loop, or of a function that is the gradient of another one. What is finished takes in
    # nothing more.
    inside = captured(tied, graph)
    floating = [is_differentiable(output) for output in outputs]
    needed = [True] * len(tensors)

    def backward(*upstream: Any, back: Pullback = back) -> Sequence[Any]:
        own = zip(upstream, floating, strict=False)
        whole = [tf.convert_to_tensor(u) if f else None for u, f in own]
        if eager or is_within(graph):
            return back.pull(tied_rule, whole, needed, specs)
        if not is_nested(graph):
            # Taken in anew, which tells the tapes that began behind the op where it comes from.
            return back.pull(restore(template, captured(tied, graph)), whole, needed, specs)
        with back.reading(functools.partial(read_beside, graph)):
            return back.pull(restore(template, inside), whole, needed, specs)

    if carrier is not None:
        carrier.carry(backward)
    forward = functools.partial(backward, back=back.untraced) if eager else backward
    record_rule(call.name, own, list(tensors), tied, backward, forward)
    return back.output.join(own)


def _own_eagerly(outputs: Sequence[Any]) -> list[Any]:
    """Tensors that are this call's alone, so that they can be given its gradient."""
    with stop_recording():
        return [tf.raw_ops.Identity(input=output) for output in outputs]
