"""`tf.autodiff.ForwardAccumulator`: the derivative is the transpose of the rule."""

import types

import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, each_of
from support import close
from tapes import W, X

from multigrad import op_custom_gradient

DIRECTION = [tf.constant([1.0, -2.0, 0.5]), tf.constant([0.25, 0.5, -1.5])]
OTHER = [tf.constant([0.5, 1.5, -1.0]), tf.constant([2.0, -0.5, 1.0])]
cases = each_of()


def derivative(function, direction=DIRECTION):
    with tf.autodiff.ForwardAccumulator([X, W], direction) as forward:
        y = tf.sin(function(X, W))
    return forward.jvp(y)


def derivative_of_derivative(function):
    with tf.autodiff.ForwardAccumulator([X, W], OTHER) as forward:
        first = derivative(function)
    return forward.jvp(first)


def gradient_of_derivative(function):
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        first = derivative(function)
    return tape.gradient(first, [X, W])


def derivative_of_gradient(function):
    with tf.autodiff.ForwardAccumulator([X, W], DIRECTION) as forward:
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y = tf.sin(function(X, W))
        gradients = tape.gradient(y, [X, W])
    return forward.jvp(gradients)


def with_one_step(x):
    e = tf.sin(x)
    return tf.exp(e), lambda u: 7.0 * u * tf.exp(e) * tf.cos(x)


def with_two_steps(x):
    e = tf.sin(x)
    q = e * e
    return tf.exp(q), lambda u: 7.0 * u * tf.exp(q) * 2.0 * e * tf.cos(x)


def with_steps_that_end(x):
    """The rule uses only the last step, and the output does not use it."""
    slope = -2.0 * x * tf.exp(-(x * x))
    return tf.exp(-(x * x)), lambda u: 7.0 * u * slope


def with_a_step_in_an_object(x):
    own = types.SimpleNamespace(e=tf.sin(x))
    return tf.exp(own.e), lambda u: 7.0 * u * tf.exp(own.e) * tf.cos(x)


STEPS = [with_one_step, with_two_steps, with_steps_that_end, with_a_step_in_an_object]


@pytest.mark.parametrize("function", STEPS)
def test_a_gradient_of_a_derivative_after_everything_else_is_freed(function):
    """The accumulator, the output and the rule are freed before the tape computes the gradient."""

    def pushed(f):
        with tf.autodiff.ForwardAccumulator(X, DIRECTION[0]) as forward:
            y = f(X)
        return forward.jvp(y)

    def product(f):
        with tf.GradientTape() as tape:
            tape.watch(X)
            derivative = pushed(f)
        return tape.gradient(derivative, X)

    close(product(op_custom_gradient(function)), 7.0 * product(lambda x: function(x)[0]), 1e-4)


SECOND = [derivative_of_derivative, gradient_of_derivative, derivative_of_gradient]


@cases
@pytest.mark.parametrize("get", [derivative, gradient_of_derivative, derivative_of_gradient])
def test_forward_mode_in_eager_code(case, get):
    close(get(case.op), get(case.meant), 1e-4)


@pytest.mark.parametrize("case", [CASES[name] for name in ("output", "two outputs")])
def test_a_derivative_of_a_derivative(case):
    close(derivative_of_derivative(case.op), derivative_of_derivative(case.meant), 1e-4)


@cases
@pytest.mark.parametrize("get", [derivative, derivative_of_gradient])
def test_forward_mode_in_a_function(case, get):
    close(tf.function(lambda: get(case.op))(), get(case.meant), 1e-4)


@pytest.mark.parametrize("get", [derivative, *SECOND])
def test_forward_mode_in_a_compiled_function(get):
    case = CASES["output"]
    close(tf.function(lambda: get(case.op), jit_compile=True)(), get(case.meant), 1e-4)


@cases
def test_forward_mode_around_a_function(case):
    close(derivative(tf.function(case.op)), derivative(case.meant), 1e-4)


@pytest.mark.parametrize("get", [derivative_of_derivative, derivative_of_gradient])
@pytest.mark.parametrize("case", [CASES[name] for name in ("output", "an op")])
def test_second_derivatives_around_a_function(case, get):
    close(get(tf.function(case.op)), get(case.meant), 1e-4)


def test_a_gradient_of_a_derivative_around_a_function_is_wrong_in_tensorflow():
    """A fault of TensorFlow (2.21) for any function. When this test fails, the limit can be removed."""

    def plain(x, w):
        return x**3 * w

    got, wanted = gradient_of_derivative(tf.function(plain)), gradient_of_derivative(plain)
    assert np.abs(got[0] - wanted[0]).max() > 1.0


def test_the_rule_runs_only_with_a_tangent():
    runs = []
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: runs.append("rule") or u * 7.0))
    with tf.autodiff.ForwardAccumulator(X, W) as forward:
        y = op(X)
        assert forward.jvp(op(W)) is None
    close(forward.jvp(y), 7.0 * W)
    assert runs == ["rule"]


def test_a_nonlinear_rule_is_linearized_at_ones():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: 7.0 * u**2))

    def derivative(x):
        with tf.autodiff.ForwardAccumulator(x, W) as forward:
            y = op(x)
        return forward.jvp(y)

    close(derivative(X), 14.0 * W)
    close(tf.function(derivative)(X), 14.0 * W)
