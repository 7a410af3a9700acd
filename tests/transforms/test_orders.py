"""Derivatives of every order by `multigrad.grad`, on each backend."""

import pytest
from cases import CASES
from keras import ops
from support import array, close

from multigrad import grad, op_custom_gradient

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)


def directional(function, order):
    """Return a sum of derivatives of this order. Each is a gradient of the weighted sum of the previous."""

    def weighted(x, w):
        return ops.sum(function(x, w) * array(1.0, -2.0, 0.5))

    for i in range(order - 1):
        weighted = slope(weighted, i % 2)
    return grad(weighted, (0, 1))


def slope(function, argument):
    return lambda x, w: ops.sum(grad(function, argument)(x, w) * array(0.5, 1.0, -1.0))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("around", [lambda y: y, lambda y: ops.sin(y) * y], ids=["alone", "in a graph"])
def test_derivatives_of_every_order(case, order, around):
    got = directional(lambda x, w: around(case.op(x, w)), order)(X, W)
    close(got, directional(lambda x, w: around(case.meant(x, w)), order)(X, W), 1e-4)


class Held:
    def __init__(self, value):
        self.value = value


@op_custom_gradient
def by_output_and_object(x):
    y, held = ops.exp(x), Held(0.0 * x + 2.0)
    return y, lambda u: 1.5 * u * y * held.value


def test_a_rule_with_an_output_and_an_object():
    """The gradient is 3 y by the rule, and the derivative of the output in the rule is 3 y, too."""
    close(grad(grad(by_output_and_object))(0.0), array(9.0))
    close(grad(grad(lambda x: by_output_and_object(x) * 2.0))(0.0), array(18.0))


@op_custom_gradient
def fivefold(x):
    return x, lambda u: 5.0 * u


@op_custom_gradient
def by_an_op_that_returns_its_argument(x):
    y = fivefold(x)
    return y * x, lambda u: u * 7.0 * y


def test_an_inner_op_that_returns_its_argument():
    """For the rule it is an intermediate result of an op with its own rule."""
    close(grad(by_an_op_that_returns_its_argument)(2.0), array(14.0))
    close(grad(grad(by_an_op_that_returns_its_argument))(2.0), array(35.0))
