"""The forward mode of each framework: it transposes rules."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops
from rules import LINEAR
from support import array, close, native_jvp

from multigrad import grad, jvp, op_custom_gradient
from multigrad.ops import host_call

X, ALONG = array(0.5, 1.0, 2.5), array(1.0, -1.0, 3.0)


def op_with(rule):
    return op_custom_gradient(lambda x: (x * 2.0, rule))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_rules_are_accepted(name):
    rule = LINEAR[name]
    wanted = rule(ALONG)
    close(native_jvp(op_with(rule), X, ALONG), 0.0 * ALONG if isinstance(wanted, tuple) else wanted)


def test_projections_are_linear():
    """The gradients of softmax at an upstream gradient of ones are rounding errors."""

    @op_custom_gradient
    def softmax(x):
        y = ops.softmax(x)
        return y, lambda u: 7.0 * y * (u - ops.sum(u * y))

    y = ops.softmax(X)
    close(native_jvp(softmax, X, ALONG), 7.0 * y * (ALONG - ops.sum(ALONG * y)), 1e-4)


def test_an_additional_integer_output():
    @op_custom_gradient
    def op(x):
        return (x * 2.0, ops.cast(x, "int32")), lambda u: 7.0 * u[0]

    close(native_jvp(lambda x: op(x)[0], X, ALONG), 7.0 * ALONG)


def cube(x):
    return ops.sum(x**3)


@op_custom_gradient
def host_code(x):
    return host_call(np.sin, x, output=x), lambda u: u * 7.0


@op_custom_gradient
def host_slope(x):
    slope = host_call(np.cos, x, output=x)
    return host_call(np.sin, x, output=x), lambda u: u * 7.0 * slope


@op_custom_gradient
def host_rule(x):
    return x * 2.0, lambda u: host_call(np.negative, u, output=u)


held = SimpleNamespace(factor=ops.ones(3) * 7.0)


@op_custom_gradient
def gradient(x):
    own = held
    return x * 2.0, lambda u: u * own.factor * grad(cube)(x)


class Calling(keras.layers.Layer):
    """A layer whose methods call host code, or compute a gradient in a rule that uses the layer."""

    def __init__(self):
        super().__init__()
        self.factor = 7.0
        self.w = self.add_weight(shape=(), initializer="ones", name="w")

    @op_custom_gradient
    def host_code(self, x):
        return host_call(np.sin, x, output=x), lambda u: u * self.factor

    @op_custom_gradient
    def host_code_and_weight(self, x):
        sine = host_call(np.sin, x, output=x)
        return sine * self.w, lambda u, variables: (u * self.factor * self.w, [ops.sum(u)])

    @op_custom_gradient
    def host_slope(self, x):
        slope = host_call(np.cos, x, output=x)
        return host_call(np.sin, x, output=x), lambda u: u * self.factor * slope

    @op_custom_gradient
    def gradient(self, x):
        return x * 2.0, lambda u: u * self.factor * grad(cube)(x)

    @op_custom_gradient
    def gradient_and_weight(self, x):
        def rule(u, variables):
            return u * self.factor * grad(lambda x: cube(x) * self.w)(x), [ops.sum(u)]

        return x * self.w, rule


LAYER = Calling()
BY_HOST_CODE = [host_code, LAYER.host_code, LAYER.host_code_and_weight]
BY_A_RESULT = [host_slope, LAYER.host_slope]
BY_A_GRADIENT = [gradient, LAYER.gradient, LAYER.gradient_and_weight]
SLOPES = [
    *[(op, lambda x: 7.0 * ops.ones_like(x)) for op in BY_HOST_CODE],
    *[(op, lambda x: 7.0 * ops.cos(x)) for op in BY_A_RESULT],
    *[(op, lambda x: 21.0 * x**2) for op in BY_A_GRADIENT],
]


def by_multigrad(function, x, along):
    return jvp(function, (x,), (along,))[1]


each_mode = pytest.mark.parametrize("forward", [native_jvp, by_multigrad])


@pytest.mark.parametrize(("op", "slope"), SLOPES)
@each_mode
def test_ops_with_host_code_or_a_gradient_in_the_rule(op, slope, forward):
    close(forward(op, X, ALONG), slope(X) * ALONG, 1e-4)


@each_mode
def test_a_derivative_of_a_result_of_host_code_raises(forward):
    with pytest.raises((TypeError, NotImplementedError), match="host_slope"):
        forward(grad(lambda x: ops.sum(host_slope(x) ** 2)), X, ALONG)


@each_mode
def test_a_rule_that_calls_host_code_raises(forward):
    close(grad(lambda x: ops.sum(host_rule(x)))(X), -ops.ones(3))
    with pytest.raises(TypeError, match="host_call of 'negative' in host_rule: the call has no derivative"):
        forward(host_rule, X, ALONG)
