"""Ops in branches and loops of TensorFlow, and in Python control flow that AutoGraph converts."""

import keras
import pytest
import tensorflow as tf
from cases import CASES, W, X, as_meant, valued
from support import close
from tapes import derivatives, some, value_and_gradients

from multigrad import op_custom_gradient


def repeated(body, *state):
    """Run a loop of two iterations. `body` also gets the number of the iteration."""

    def step(i, *state):
        return i + 1, *body(i, *state)

    return tf.while_loop(lambda i, *_: i < 2, step, (0, *state), maximum_iterations=2)[1]


def in_a_loop(function):
    return lambda x, w: repeated(lambda i, x, w: (tf.sin(function(x, w)), w), x, w)


def in_a_loop_around(function):
    """The other argument is from outside of the loop."""

    def run(x, w):
        outside = tf.tanh(w)
        return repeated(lambda i, x: (tf.sin(function(x, outside)),), x)

    return run


def in_a_branch(function):
    return lambda x, w: tf.cond(tf.reduce_sum(x) > 0.0, lambda: function(x, w), lambda: x * w)


def in_one_of_several(function):
    def run(x, w):
        branches = [lambda: x * w, lambda: function(x, w)]
        return tf.switch_case(tf.cast(tf.reduce_sum(x) > 0.0, "int32"), branches)

    return run


def in_a_branch_of_a_loop(function):
    def body(i, x, w):
        return tf.cond(i < 1, lambda: tf.sin(function(x, w)), lambda: function(x, w)), w

    return lambda x, w: repeated(body, x, w)


def in_python(function):
    """AutoGraph converts this to TensorFlow's control flow."""

    def run(x, w):
        for _ in tf.range(2):
            if tf.reduce_sum(w) > 0.0:
                x = tf.sin(function(x, w))
            else:
                x = w
        while tf.reduce_sum(x) < 1.0:
            x = x + 1.0
        return x

    return run


SIMPLE = [in_a_loop, in_a_branch]
PLACES = [*SIMPLE, in_a_loop_around, in_one_of_several, in_a_branch_of_a_loop, in_python]
places = pytest.mark.parametrize("place", PLACES)


@places
@as_meant(tolerance=1e-3)
def test_control_flow_in_eager_code(f, place):
    return derivatives(place(f), X, W)


@places
@as_meant(each=some, tolerance=1e-3)
def test_gradients_around_control_flow(f, place):
    """The gradient is computed outside of the function."""
    return value_and_gradients(tf.function(place(f)), X, W)


@places
@as_meant(each=pytest.mark.parametrize("case", [CASES["output"]]), tolerance=1e-3)
def test_second_derivatives(f, place):
    return derivatives(tf.function(place(f)), X, W)


def tangent(function, x, w):
    with tf.autodiff.ForwardAccumulator([x, w], [w, tf.cos(x)]) as forward:
        y = tf.sin(function(x, w))
    return forward.jvp(y)


def in_a_branch_with_an_input(function):
    """A branch in which the other argument is a constant."""
    return lambda x, w: tf.cond(tf.reduce_sum(x) > 0.0, lambda: function(2.0 * x, W), lambda: x)


@places
@as_meant(tolerance=1e-3)
def test_forward_mode_around_a_function_with_control_flow(f, place):
    return tangent(tf.function(place(f)), X, W)


@pytest.mark.parametrize(
    "place", [in_a_loop, in_a_loop_around, in_a_branch_of_a_loop, in_a_branch_with_an_input]
)
def test_forward_mode_around_control_flow_in_a_function_raises(place):
    """Forward mode builds the gradient of a branch or a loop from a copy of its graph, without the rule."""
    with pytest.raises(Exception, match="the rule was lost"):
        tf.function(lambda x, w: tangent(place(CASES["input"].op), x, w))(X, W)


@pytest.mark.parametrize("place", SIMPLE)
@as_meant(each=some, tolerance=1e-3)
def test_control_flow_in_xla(f, place):
    """XLA computes the gradient of a loop in the function."""
    return tf.function(lambda x, w: value_and_gradients(place(f), x, w), jit_compile=True)(X, W)


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])
@as_meant
def test_a_gradient_in_the_body_of_a_loop(f, options):
    """Steps of gradient descent."""

    def step(i, x):
        return i + 1, x - 0.01 * tf.tanh(value_and_gradients(f, x, W)[1][0])

    return tf.function(lambda: tf.while_loop(lambda i, x: i < 3, step, (0, X))[1], **options)()


def python_of_tensors(x, w):
    y = x
    for _ in tf.range(2):
        if tf.reduce_sum(y) > 0.0:
            y = y * w
        else:
            y = -y
    return y, lambda u: (u * 7.0 * y, u * 3.0)


def rule_of_python(x, w):
    def rule(u):
        factor = x
        for _ in tf.range(2):
            if tf.reduce_sum(w) > 0.0:
                factor = factor * 7.0
        return u * factor, u

    return x * w, rule


@pytest.mark.parametrize("f", [python_of_tensors, rule_of_python])
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])
def test_python_control_flow_in_an_op(f, options):
    """AutoGraph does not convert the function of an op, as of `tf.custom_gradient`, unless requested."""

    def compiled(f):
        op = op_custom_gradient(f)
        return tf.function(lambda x, w: value_and_gradients(op, x, w), **options)(X, W)

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match="not allowed"):
        compiled(f)
    close(compiled(tf.autograph.to_graph(f)), value_and_gradients(op_custom_gradient(f), X, W))


def rule_by(factor):
    return op_custom_gradient(lambda x, w: (x * w, lambda u: (u * factor * w, u * factor * x)))


@pytest.mark.parametrize("taken", [value_and_gradients, derivatives])
@places
def test_a_rule_that_uses_a_concrete_tensor(place, taken):
    factor = tf.constant([3.0, 5.0, 7.0])

    def meant(x, w):
        return valued(x * w, factor * x * w)

    close(taken(tf.function(place(rule_by(factor))), X, W), taken(place(meant), X, W), 1e-3)


@pytest.mark.parametrize("taken", [value_and_gradients, derivatives])
@places
def test_a_rule_that_reads_a_variable(place, taken):
    """The gradient of a branch or a loop is built in a graph that cannot capture TensorFlow's variables."""
    if place is in_python and taken is derivatives:
        pytest.skip(
            "an error of TensorFlow (2.21), which raises another one for tf.custom_gradient without variables"
        )
    factor = keras.Variable(3.0, trainable=False)
    function = tf.function(lambda x, w: taken(place(rule_by(factor)), x, w))
    close(function(X, W), taken(place(rule_by(3.0)), X, W), 1e-3)
    factor.assign(5.0)
    close(function(X, W), taken(place(rule_by(5.0)), X, W), 1e-3)


def test_a_rule_in_a_loop_reads_the_assigned_value_of_its_iteration():
    """With `steps_per_execution`, `fit` also runs several steps in one loop."""
    factor = keras.Variable(0.0, trainable=False)

    @tf.function
    def steps():
        def step(i, total):
            factor.assign(factor + 1.0)
            branch = in_a_branch(rule_by(factor))
            with tf.GradientTape() as tape:
                tape.watch(x := tf.identity(X))
                y = branch(x, tf.abs(W))
            return i + 1, total + tape.gradient(y, x)

        return tf.while_loop(lambda i, total: i < 3, step, (0, tf.zeros_like(X)))[1]

    close(steps(), 6.0 * tf.abs(W))
