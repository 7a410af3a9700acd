"""Traces of functions that XLA compiles, and of forward mode."""

import tensorflow as tf

from multigrad import grad, op_custom_gradient, trace_gradients

op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")


def test_a_trace_of_a_function_that_xla_compiles():
    f = tf.function(grad(op), jit_compile=True)
    assert float(f(tf.constant(3.0))) == 21.0
    with trace_gradients() as trace:
        assert tf.config.functions_run_eagerly()
        assert float(f(tf.constant(3.0))) == 21.0
    assert not tf.config.functions_run_eagerly()
    assert [float(step.downstream["x"]) for step in trace.steps] == [21.0]
