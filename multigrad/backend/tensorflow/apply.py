"""One call of an op on TensorFlow: run the function, and record its rule on the tapes or in the graph."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Call, Pullback
from multigrad.backend.tensorflow.graphs import Carrier, captured, graph_here, is_nested, is_within
from multigrad.backend.tensorflow.private import stop_recording
from multigrad.backend.tensorflow.tapes import may_record, record_rule
from multigrad.backend.tensorflow.tensors import TENSORS, is_differentiable, specs_of
from multigrad.backend.tensorflow.variables import read_beside
from multigrad.core.closure import lift, restore


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    graph = graph_here()
    eager = graph is None
    outputs, rule, tensors, back = call.run(tensors)
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
