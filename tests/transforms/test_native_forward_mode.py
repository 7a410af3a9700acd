"""The forward mode of each framework: it transposes rules."""

import pytest
from keras import ops
from rules import LINEAR
from support import array, close, native_jvp

from multigrad import op_custom_gradient

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
