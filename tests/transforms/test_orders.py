"""Derivatives of every order by `multigrad.grad`, on each backend."""

import keras
import pytest
from cases import CASES, IN_OTHER_FORMS
from keras import ops
from support import array, close, compiled_with_variables

from multigrad import grad, op_custom_gradient

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)


ALONE, IN_A_GRAPH = (lambda y: y), (lambda y: ops.sin(y) * y)


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
@pytest.mark.parametrize("around", [ALONE, IN_A_GRAPH], ids=["alone", "in a graph"])
def test_derivatives_of_every_order(case, order, around):
    got = directional(lambda x, w: around(case.op(x, w)), order)(X, W)
    close(got, directional(lambda x, w: around(case.meant(x, w)), order)(X, W), 1e-4)


def curved(y):
    return ops.sin(0.1 * y) * y


def all_gradients(function, weights):
    """Return a function of the gradients with respect to the arguments and the weights."""

    def gradients(x, w):
        return keras.tree.flatten(grad(function, (0, 1), variables=weights)(x, w))

    return gradients


def with_weights(function, weights, order):
    """Return a sum of derivatives of this order, each with respect to the arguments and the weights."""

    def weighted(x, w):
        return ops.sum(function(x, w) * array(1.0, -2.0, 0.5))

    for i in range(order - 1):
        gradients = all_gradients(weighted, weights)
        # The last gradient is the weight's.
        factors = array(0.5, 1.0, -1.0) if i % 2 else array(-1.0, 0.25, 1.0)

        def weighted(x, w, gradients=gradients, factors=factors):
            return sum([ops.sum(gradient * factors) for gradient in gradients(x, w)[1:]])

    return all_gradients(weighted, weights)


in_other_forms = pytest.mark.parametrize("case", IN_OTHER_FORMS.values(), ids=IN_OTHER_FORMS)


@in_other_forms
@pytest.mark.parametrize("order", [1, 2, 3])
def test_derivatives_in_other_forms(case, order):
    got, wanted = [
        with_weights(lambda x, w, f=f: curved(f(x, w)), case.weights, order)(X, W)
        for f in (case.op, case.meant)
    ]
    close(got, wanted, 1e-4)


@in_other_forms
@pytest.mark.parametrize("order", [1, 2])
def test_compiled_derivatives_in_other_forms(case, order):
    derivatives = compiled_with_variables(with_weights(case.op, case.weights, order))
    close(derivatives(X, W), with_weights(case.meant, case.weights, order)(X, W), 1e-4)
    for weight in case.weights:
        value = ops.copy(weight.value)
        weight.assign(1.2 * value)
        try:
            close(derivatives(X, W), with_weights(case.meant, case.weights, order)(X, W), 1e-4)
        finally:
            weight.assign(value)


@op_custom_gradient
def fivefold(x):
    return x, lambda u: 5.0 * u


@op_custom_gradient
def by_an_op_that_returns_its_argument(x):
    y = fivefold(x)
    return y * x, lambda u: u * 7.0 * y


def test_an_inner_op_that_returns_its_argument():
    """For the outer rule, the result of the inner op is an intermediate result with its own rule."""
    close(grad(by_an_op_that_returns_its_argument)(2.0), array(14.0))
    close(grad(grad(by_an_op_that_returns_its_argument))(2.0), array(35.0))
