"""The examples of custom gradients in the documentation of TensorFlow, Keras and Keras for R."""

import math

import pytest
from keras import ops
from support import array, close, numpy

from multigrad import grad, jvp, op_custom_gradient, value_and_grad


@op_custom_gradient
def log1pexp(x):
    e = ops.exp(x)

    def rule(upstream):
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))

    return ops.log(1.0 + e), rule


def test_log1pexp_is_stable():
    plain = grad(lambda x: ops.log(1.0 + ops.exp(x)))(100.0)
    assert math.isnan(numpy(plain))
    assert numpy(grad(log1pexp)(100.0)) == 1.0


def test_upstream_gradients_follow_the_chain_rule():
    upstreams = []

    @op_custom_gradient
    def square(x):
        def rule(upstream):
            upstreams.append(float(numpy(upstream)))
            return upstream * 2 * x

        return x**2, rule

    value, gradient = value_and_grad(lambda x: square(square(square(x))))(2.0)
    assert (numpy(value), numpy(gradient)) == (256.0, 1024.0)
    assert upstreams == [1.0, 32.0, 256.0]


def test_a_rule_that_ignores_upstream_breaks_the_chain_rule():
    @op_custom_gradient
    def forgetful(x):
        return x**2, lambda upstream: 2 * x

    # The factor 5 and the outer square are lost.
    close(grad(lambda x: 5.0 * forgetful(x) ** 2)(3.0), array(6.0))


def test_a_decorated_rule():
    """The gradient of the rule with respect to its upstream gradient is the gradient of its own rule.

    It has none with respect to `x`, so a second derivative of the op raises an error.
    """

    @op_custom_gradient
    def op(x):
        @op_custom_gradient
        def rule(upstream):
            return upstream * 3.0 * x, lambda ddy: ddy * 7.0

        return x**2, rule

    close(grad(op)(2.0), array(6.0))
    close(jvp(op, (2.0,), (3.0,))[1], array(7.0 * 3.0))
    with pytest.raises(
        (TypeError, RuntimeError), match="rule: the output depends on a differentiated tensor"
    ):
        grad(grad(op))(2.0)


def test_the_fused_second_order_pattern():
    """TensorFlow's documentation, with false factors: 5 for first order, 11 and 13 for second."""

    @op_custom_gradient
    def op_with_fused_backprop(x):
        y, x_grad = x**3, 5.0 * x**2

        def first_order_gradient(dy):
            @op_custom_gradient
            def first_order_custom(unused_x):
                def second_order_and_transpose(ddy):
                    return ddy * 11.0 * x

                return x_grad, second_order_and_transpose

            return dy * first_order_custom(x)

        return y, first_order_gradient

    close(grad(op_with_fused_backprop)(2.0), array(20.0))
    close(grad(grad(op_with_fused_backprop))(2.0), array(22.0))
    # Inside a larger graph: d2/dx2 of y^2 = 2 (dy/dx)^2 + 2 y * second.
    close(grad(grad(lambda x: op_with_fused_backprop(x) ** 2))(2.0), array(2 * 20.0**2 + 2 * 8 * 22.0))


def test_the_hybrid_signature_of_keras_and_r():
    @op_custom_gradient
    def op(x):
        e = ops.exp(x)

        def rule(*args, upstream=None):
            if upstream is None:
                (upstream,) = args
            return ops.multiply(upstream, 3.0 * e)

        return e, rule

    close(grad(op)(0.0), array(3.0))
