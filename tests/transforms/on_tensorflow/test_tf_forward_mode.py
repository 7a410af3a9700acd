"""`tf.autodiff.ForwardAccumulator`: the derivative is the transpose of the rule."""

import types

import numpy as np
import pytest
import tensorflow as tf
from cases import CASES, W, X, all_as_meant, as_meant
from support import close, native_jvp
from tapes import tape_gradient

from multigrad import grad, op_custom_gradient, vjp
from multigrad.ops import fixed_point, host_call

DIRECTION = [tf.constant([1.0, -2.0, 0.5]), tf.constant([0.25, 0.5, -1.5])]
OTHER = [tf.constant([0.5, 1.5, -1.0]), tf.constant([2.0, -0.5, 1.0])]


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


STEPS = [with_one_step, with_two_steps, with_steps_that_end]


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

test_forward_mode = all_as_meant(
    {
        "a derivative": derivative,
        "in a function": lambda f: tf.function(lambda: derivative(f))(),
        "around a function": lambda f: derivative(tf.function(f)),
    }
)
test_second_derivatives = all_as_meant(
    {
        "a gradient of a derivative": gradient_of_derivative,
        "a derivative of a gradient": derivative_of_gradient,
        "in a function": lambda f: tf.function(lambda: derivative_of_gradient(f))(),
        "around a function": lambda f: derivative_of_gradient(tf.function(f)),
    }
)
test_derivatives_of_derivatives = all_as_meant(
    {
        "eager": derivative_of_derivative,
        "around a function": lambda f: derivative_of_derivative(tf.function(f)),
    },
    each=pytest.mark.parametrize("case", [CASES["output"], CASES["two outputs"]]),
)


@pytest.mark.parametrize("get", [derivative, *SECOND])
@as_meant(each=pytest.mark.parametrize("case", [CASES["output"]]))
def test_forward_mode_in_xla(f, get):
    return tf.function(lambda: get(f), jit_compile=True)()


@op_custom_gradient
def host_square(x):
    return host_call(np.square, x, output=x), lambda u: u * 7.0 * x


@op_custom_gradient
def host_sine(x):
    slope = host_call(np.cos, x, output=x)
    return host_call(np.sin, x, output=x), lambda u: u * 7.0 * slope


@pytest.mark.parametrize("get", [derivative, *SECOND])
def test_host_code_in_a_function(get):
    meant = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x))
    close(tf.function(lambda: get(lambda x, w: host_square(x) * w))(), get(lambda x, w: meant(x) * w), 1e-4)


@pytest.mark.parametrize("get", SECOND)
def test_a_further_derivative_of_a_result_of_host_code_in_a_function_raises(get):
    with pytest.raises(NotImplementedError, match="host_sine: in a derivative of forward mode"):
        tf.function(lambda: get(lambda x, w: host_sine(x) * w))()


def test_a_nonlinear_rule_is_linearized_at_ones():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: 7.0 * u**2))

    def derivative(x):
        with tf.autodiff.ForwardAccumulator(x, W) as forward:
            y = op(x)
        return forward.jvp(y)

    close(derivative(X), 14.0 * W)
    close(tf.function(derivative)(X), 14.0 * W)


def root(x):
    return fixed_point(lambda z, x: (z + x / z) / 2.0, tf.ones(2), x)


def by_a_gradient(x):
    """The false factor is 7."""
    op = op_custom_gradient(
        lambda x: (x**2.5, lambda u: 7.0 * u * vjp(lambda x: x**2.5, x)[1](tf.ones(2))[0])
    )
    return op(x)


GRADIENTS = {
    root: (lambda x: 0.5 * x**-0.5, lambda x: -0.25 * x**-1.5),
    by_a_gradient: (lambda x: 17.5 * x**1.5, lambda x: 26.25 * x**0.5),
}


@pytest.mark.parametrize("function", [root, by_a_gradient])
def test_second_derivatives_by_a_rule_that_computes_a_gradient(function):
    x, along, (slope, second) = tf.constant([2.0, 3.0]), tf.constant([1.0, -0.5]), GRADIENTS[function]
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.autodiff.ForwardAccumulator(x, along) as forward:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            gradient = inner.gradient(y, x)
        first = forward.jvp(y)
    close(gradient, slope(x), 1e-3)
    close(forward.jvp(gradient), second(x) * along, 1e-3)
    close(outer.gradient(first, x), second(x) * along, 1e-3)


def test_a_rule_that_computes_a_gradient_and_uses_an_object_with_a_tangent():
    @op_custom_gradient
    def op(x):
        own = types.SimpleNamespace(x=x)
        return x**2, lambda u: u * grad(lambda x: tf.reduce_sum(x**2))(own.x)

    with tf.autodiff.ForwardAccumulator(X, W), pytest.raises(TypeError, match="through an object"):
        op(X)


@op_custom_gradient
def in_object(x):
    own = types.SimpleNamespace(slope=host_call(np.cos, x, output=x))
    return x**2, lambda u: u * 7.0 * own.slope


@pytest.mark.parametrize("op", [host_sine, in_object])
@pytest.mark.parametrize("derivative", [tape_gradient, lambda op, x: native_jvp(op, x, W)])
def test_a_further_derivative_of_a_result_of_host_call_raises(op, derivative):
    close(native_jvp(op, X, W), 7.0 * tf.cos(X) * W)
    with pytest.raises(NotImplementedError, match=f"{op.__name__}: in a derivative of forward mode"):
        native_jvp(lambda x: derivative(op, x), X, W)
