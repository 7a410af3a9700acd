"""One call of an op on TensorFlow: run the function, and record its rule on the tapes or in the graph."""

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Call, Pullback
from multigrad.backend.tensorflow.graphs import Carrier, capture, graph_here, is_nested, is_within
from multigrad.backend.tensorflow.private import stop_recording
from multigrad.backend.tensorflow.tapes import may_record, record_rule, run_noting_host_calls
from multigrad.backend.tensorflow.tensors import is_differentiable, specs_of
from multigrad.backend.tensorflow.variables import read_for_gradient
from multigrad.core.closure import restore


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    graph = graph_here()
    eager = graph is None
    run, host_calls = run_noting_host_calls(call, tensors)
    outputs, inputs, pullback = run.outputs, run.inputs, run.pullback
    if not outputs or (eager and not may_record()):
        return pullback.output.join(outputs)
    specs = specs_of(capture(inputs, graph))
    if not any(specs):
        # Tensors that the function closes over have no gradient.
        return pullback.output.join([tf.stop_gradient(output) for output in outputs])
    run.lift(call.f)
    template = run.template
    others = () if eager else run.others()
    carrier = None if eager else Carrier(call.name, outputs, inputs, others)
    tied_outputs = _copies(outputs) if carrier is None else carrier.outputs
    # The rule differentiates the inputs and the tied outputs that it uses.
    residuals = run.residuals_with(tied_outputs)
    rule = restore(template, residuals)
    # A gradient may be built in another graph than the call: the gradient of a branch or a loop, or the
    # gradient of a gradient function. It uses tensors that the graph of the call has captured, so they are
    # captured now: a finished graph captures no more tensors.
    captured = capture(residuals, graph)
    floating = [is_differentiable(output) for output in outputs]
    needed = [True] * len(inputs)

    def pull(
        rule: Any, upstreams: Sequence[Any], pullback: Pullback = pullback, specs: list[Any] = specs
    ) -> Sequence[Any]:
        pairs = zip(upstreams, floating, strict=False)
        upstream = [tf.convert_to_tensor(u) if f else None for u, f in pairs]
        return pullback.pull(rule, upstream, needed, specs)

    def backward(*upstreams: Any) -> Sequence[Any]:
        if eager or is_within(graph):
            return pull(rule, upstreams)
        if not is_nested(graph):
            # Captured again, so that tapes that began after the op record the captured tensors.
            return pull(restore(template, capture(residuals, graph)), upstreams)
        with pullback.scope_with_reader(functools.partial(read_for_gradient, graph)):
            return pull(restore(template, captured), upstreams)

    def forward(residuals: Sequence[Any], *upstreams: Any) -> Sequence[Any]:
        return pull(restore(template, residuals), upstreams, pullback.without_trace if eager else pullback)

    if carrier is not None:
        roles = run.roles

        def backward_of_copy(copy: Any, *upstreams: Any) -> Sequence[Any]:
            copied_rule = restore(template, carrier.residuals_of(copy, others, roles))
            with pullback.scope_with_reader(functools.partial(read_for_gradient, copy.graph)):
                return pull(copied_rule, upstreams, specs=specs_of(carrier.inputs_of(copy)))

        carrier.bind(backward, backward_of_copy)
    record_rule(call.name, run, tied_outputs, residuals, backward, forward, host_calls)
    return pullback.output.join(tied_outputs)


def _copies(outputs: Sequence[Any]) -> list[Any]:
    """Return tensors that no other operation returns, so that the tapes can record the rule for them."""
    with stop_recording():
        return [tf.raw_ops.Identity(input=output) for output in outputs]
