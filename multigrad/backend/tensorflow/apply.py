"""One call of an op on TensorFlow: run the function, and record its rule on the tapes or in the graph."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Call
from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.graphs import Carrier, capture, graph_here, is_nested, is_within
from multigrad.backend.tensorflow.tapes import may_record, record_rule, require_no_history, run_function
from multigrad.backend.tensorflow.tensors import is_differentiable, specs_of
from multigrad.backend.tensorflow.variables import read_for_gradient


def apply(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
    graph = graph_here()
    eager = graph is None
    run, host_calls, marker, watched = run_function(call, tensors)
    outputs, inputs = run.outputs, run.inputs
    if not outputs or (eager and not may_record()):
        return outputs
    specs = specs_of(capture(inputs, graph))
    if marker is None and not any(specs):
        return [tf.stop_gradient(output) for output in outputs]
    rule = run.lift(call.f)
    rule.specs = specs
    carrier = None if eager else Carrier(call.name, outputs, inputs, run.other_residuals())
    tied_outputs = _copies(outputs) if carrier is None else carrier.outputs
    # The rule differentiates the inputs and the tied outputs that it uses.
    residuals = run.residuals_with(inputs, tied_outputs)
    # A gradient may be built in another graph than the call: the gradient of a branch or a loop, or the
    # gradient of a gradient function. It uses tensors that the graph of the call has captured, so they are
    # captured now: a finished graph captures no more tensors.
    captured = capture(residuals, graph)
    floating = [is_differentiable(output) for output in outputs]
    needed = [True] * len(inputs)

    def call_rule(
        residuals: Sequence[Any], upstreams: Sequence[Any], transposed: bool = False
    ) -> Sequence[Any]:
        if not transposed:
            require_no_history(call.name, rule, watched)
        return rule.pull(residuals, _dense_floating(upstreams, floating), needed, transposed)

    def backward(*upstreams: Any) -> Sequence[Any]:
        if eager or is_within(graph):
            return call_rule(residuals, upstreams)
        if not is_nested(graph):
            # Captured again, so that tapes that began after the op record the captured tensors.
            return call_rule(capture(residuals, graph), upstreams)
        with rule.scope_with_reader(functools.partial(read_for_gradient, graph)):
            return call_rule(captured, upstreams)

    def forward(residuals: Sequence[Any], *upstreams: Any) -> Sequence[Any]:
        return call_rule(residuals, upstreams, transposed=True)

    if carrier is not None:
        carrier.bind(backward)
    record_rule(call.name, rule, inputs, tied_outputs, residuals, backward, forward, host_calls, marker)
    return tied_outputs


def _dense_floating(upstreams: Sequence[Any], floating: Sequence[bool]) -> list[Any]:
    """Return the upstream gradients for a rule: dense tensors, and None for integer outputs."""
    return [tf.convert_to_tensor(u) if f else None for u, f in zip(upstreams, floating, strict=False)]


def _copies(outputs: Sequence[Any]) -> list[Any]:
    """Return tensors that no other operation returns, so that the tapes can record the rule for them."""
    with private.stop_recording():
        return [tf.raw_ops.Identity(input=output) for output in outputs]
