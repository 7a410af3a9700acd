"""Traces of gradients in compiled, mapped and repeated code, and in forward mode."""

import jax
import jax.numpy as jnp

from multigrad import op_custom_gradient, trace_gradients

op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")


def test_a_trace_of_a_batch_has_a_call_for_each_example():
    with trace_gradients() as trace:
        jax.jit(jax.vmap(jax.grad(op)))(jnp.arange(3.0))
    assert [float(call.inputs["x"]) for call in trace.calls] == [0.0, 1.0, 2.0]
    assert [(step.call.number, float(step.downstream["x"])) for step in trace.steps] == [
        (1, 0.0),
        (2, 7.0),
        (3, 14.0),
    ]


def test_a_trace_of_a_loop():

    def loop(x):
        return jax.lax.scan(lambda carry, _: (op(carry), None), x, None, length=2)[0]

    with trace_gradients() as trace:
        jax.jit(jax.grad(loop))(2.0)
    assert [float(step.downstream["x"]) for step in trace.steps] == [28.0, 28.0 * 14.0]
