"""`tf.function`: with and without XLA, with static and dynamic shapes, with gradients inside and outside."""

import pytest
import tensorflow as tf
from cases import CASES, each_of
from support import close
from tapes import W, X, derivatives, value_and_gradients

from multigrad import op_custom_gradient

cases = each_of()
some = pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "two outputs")])
ways = pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])


@cases
@ways
def test_derivatives_in_a_function(case, options):
    function = tf.function(lambda x, w: derivatives(case.op, x, w), **options)
    close(function(X, W), derivatives(case.meant, X, W), 1e-4)


@cases
@ways
def test_derivatives_around_a_function(case, options):
    close(derivatives(tf.function(case.op, **options), X, W), derivatives(case.meant, X, W), 1e-4)


@some
@ways
def test_a_gradient_around_a_gradient_in_a_function(case, options):
    def slope(function):
        return lambda x, w: value_and_gradients(function, x, w)[1][0]

    got = value_and_gradients(tf.function(slope(case.op), **options), X, W)
    close(got, value_and_gradients(slope(case.meant), X, W), 1e-4)


@cases
@ways
def test_a_gradient_around_a_gradient_function(case, options):
    """The gradient of the inner function is a function, whose gradient is built in another graph."""

    def slope(function):
        return lambda x, w: value_and_gradients(tf.function(function), x, w)[1][0]

    got = value_and_gradients(tf.function(slope(case.op), **options), X, W)
    close(got, value_and_gradients(slope(case.meant), X, W), 1e-4)


def test_a_tape_that_begins_after_the_op():
    """An inner function computes the gradient. The residuals of the rule are from outside of both."""

    @tf.function
    def of_the_rule(x, w):
        @tf.function
        def within(u):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = CASES["input"].op(x, w)
            with tf.GradientTape() as behind:
                behind.watch(w)
                slope = tf.function(lambda u: tape.gradient(y, x, u))(u)
            return behind.gradient(slope, w)

        return within(tf.ones_like(x))

    close(of_the_rule(X, W), 21.0 * X**2)


@some
@ways
def test_nested_functions(case, options):
    inner = tf.function(case.op)
    function = tf.function(lambda x, w: derivatives(tf.function(lambda x, w: inner(x, w)), x, w), **options)
    close(function(X, W), derivatives(case.meant, X, W), 1e-4)


@some
@pytest.mark.parametrize("shape", [[None], None], ids=["dimension", "rank"])
def test_input_signatures(case, shape):
    signature = [tf.TensorSpec(shape, "float32")] * 2
    inside = tf.function(lambda x, w: derivatives(case.op, x, w), input_signature=signature)
    outside = tf.function(case.op, input_signature=signature)
    for count in (3, 2):
        x, w = X[:count], W[:count]
        wanted = derivatives(case.meant, x, w)
        close(inside(x, w), wanted, 1e-4)
        close(derivatives(outside, x, w), wanted, 1e-4)


@ways
def test_the_function_and_the_rule_are_traced_once(options):
    """They are defined in the function, which is traced once, and so are they."""
    runs = []

    def define(factor):
        @op_custom_gradient
        def op(x):
            runs.append("function")

            def rule(u):
                runs.append("rule")
                return u * factor * x

            return x**2, rule

        return op

    @tf.function(**options)
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = define(7.0)(x)
        return tape.gradient(y, x)

    for factor in (1.0, 2.0, 3.0):
        close(gradients(factor * X), 7.0 * factor * X)
    assert runs == ["function", "rule"]


@pytest.mark.parametrize("custom_gradient", [op_custom_gradient, tf.custom_gradient])
def test_an_op_as_an_argument(custom_gradient):
    """TensorFlow 2.21 passes on the wrapped function of any wrapper, and its pair is not a tensor."""
    op = custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))
    with pytest.raises(TypeError, match="Expected float32, but got"):
        tf.function(lambda f: tf.sin(f(X)), autograph=False)(op)
    close(tf.function(lambda f: tf.sin(f(X)), autograph=False)(lambda x: op(x)), tf.sin(2.0 * X))
