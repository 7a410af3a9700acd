"""Ops in branches and loops: TensorFlow's own, and those that AutoGraph makes of Python's."""

import pytest
import tensorflow as tf
from cases import CASES
from support import close
from tapes import W, X, derivatives, value_and_gradients

from multigrad import op_custom_gradient

some = pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "two outputs")])
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def in_a_loop(function):
    def body(i, x, w):
        return i + 1, tf.sin(function(x, w)), w

    return lambda x, w: tf.while_loop(lambda i, x, w: i < 2, body, (0, x, w), maximum_iterations=2)[1]


def in_a_loop_around(function):
    """The other argument comes from outside of the loop."""

    def run(x, w):
        w = tf.tanh(w)

        def body(i, x):
            return i + 1, tf.sin(function(x, w))

        return tf.while_loop(lambda i, x: i < 2, body, (0, x), maximum_iterations=2)[1]

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
        return i + 1, tf.cond(i < 1, lambda: tf.sin(function(x, w)), lambda: function(x, w)), w

    return lambda x, w: tf.while_loop(lambda i, x, w: i < 2, body, (0, x, w), maximum_iterations=2)[1]


def in_python(function):
    """AutoGraph makes TensorFlow's control flow of this."""

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


@cases
@pytest.mark.parametrize("place", PLACES)
def test_eagerly(case, place):
    close(derivatives(place(case.op), X, W), derivatives(place(case.meant), X, W), 1e-3)


@some
@pytest.mark.parametrize("place", PLACES)
def test_from_outside(case, place):
    """The gradient is taken outside of the function, of the whole."""
    got = value_and_gradients(tf.function(place(case.op)), X, W)
    close(got, value_and_gradients(place(case.meant), X, W), 1e-3)


@pytest.mark.parametrize("place", PLACES)
def test_second_derivatives(place):
    case = CASES["output"]
    close(derivatives(tf.function(place(case.op)), X, W), derivatives(place(case.meant), X, W), 1e-3)


@some
@pytest.mark.parametrize("place", SIMPLE)
def test_compiled(case, place):
    """XLA takes the gradient of a loop inside of the function."""
    function = tf.function(lambda x, w: value_and_gradients(place(case.op), x, w), jit_compile=True)
    close(function(X, W), value_and_gradients(place(case.meant), X, W), 1e-3)


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])
def test_a_gradient_in_the_body_of_a_loop(options):
    """Steps of gradient descent."""

    def descend(function):
        def step(i, x):
            return i + 1, x - 0.01 * tf.tanh(value_and_gradients(function, x, W)[1][0])

        return lambda: tf.while_loop(lambda i, x: i < 3, step, (0, X))[1]

    for case in CASES.values():
        close(tf.function(descend(case.op), **options)(), descend(case.meant)(), 1e-4)


def test_what_a_body_is_traced_and_runs():
    """Once, however long the loop is."""
    runs = []

    @op_custom_gradient
    def op(x, w):
        runs.append("function")
        e = tf.exp(x)
        return e * w, lambda u: runs.append("rule") or (u * e, u * 7.0)

    function = tf.function(lambda x, w: value_and_gradients(in_a_loop(op), x, w))
    function(X, W)
    function(2.0 * X, W)
    assert runs.count("function") == runs.count("rule") == 1
    del runs[:]
    value_and_gradients(in_a_loop(op), X, W)
    assert runs == ["function"] * 2 + ["rule"] * 2


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
@pytest.mark.parametrize("custom_gradient", [op_custom_gradient, tf.custom_gradient])
def test_python_inside_an_op(f, options, custom_gradient):
    """AutoGraph leaves the function of an op alone, as it does that of `tf.custom_gradient`; unless asked."""
    op = custom_gradient(f)

    def compiled(op):
        return tf.function(lambda x, w: value_and_gradients(op, x, w), **options)

    wanted = value_and_gradients(op, X, W)
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError, match="not allowed"):
        compiled(op)(X, W)
    if custom_gradient is op_custom_gradient:
        close(compiled(custom_gradient(tf.autograph.to_graph(f)))(X, W), wanted)
