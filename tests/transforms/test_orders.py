"""Derivatives of every order by `multigrad.grad`, in every form, on each backend."""

import keras
import pytest
from cases import CASES, IN_OTHER_FORMS, V, W, X
from keras import ops
from support import array, close, compiled_with_variables

from multigrad import grad

EVERY_FORM = {**CASES, **IN_OTHER_FORMS}
each_form = pytest.mark.parametrize("case", EVERY_FORM.values(), ids=EVERY_FORM)


def all_gradients(function, weights):
    """Return a function of the gradients with respect to the arguments and the weights."""

    def gradients(x, w):
        return keras.tree.flatten(grad(function, (0, 1), variables=weights)(x, w))

    return gradients if weights else grad(function, (0, 1))


def derivatives(function, weights, order):
    """Return sums of derivatives of this order, with respect to the arguments and the weights."""

    def weighted(x, w):
        return ops.sum(function(x, w) * V)

    for i in range(order - 1):
        gradients = all_gradients(weighted, weights)
        factors = array(0.5, 1.0, -1.0) if i % 2 else array(-1.0, 0.25, 1.0)

        def weighted(x, w, gradients=gradients, factors=factors):
            of_x, *others = gradients(x, w)
            return ops.sum(of_x * factors) + sum([ops.sum(gradient) for gradient in others])

    return all_gradients(weighted, weights)


@pytest.mark.parametrize("around", [lambda y: y, lambda y: ops.sin(0.1 * y) * y], ids=["alone", "in a graph"])
@pytest.mark.parametrize("order", [1, 2, 3])
@each_form
def test_derivatives_of_every_order(case, order, around):
    got, wanted = [
        derivatives(lambda x, w, f=f: around(f(x, w)), case.weights, order)(X, W)
        for f in (case.op, case.meant)
    ]
    close(got, wanted, 1e-3 if order == 3 else 1e-4)


@pytest.mark.parametrize("order", [1, 2])
@each_form
def test_compiled_derivatives(case, order):
    compiled = compiled_with_variables(derivatives(case.op, case.weights, order))
    values = [ops.copy(weight.value) for weight in case.weights]
    try:
        for factor in (1.0, 1.2):
            for weight, value in zip(case.weights, values, strict=True):
                weight.assign(factor * value)
            close(compiled(X, W), derivatives(case.meant, case.weights, order)(X, W), 1e-4)
    finally:
        for weight, value in zip(case.weights, values, strict=True):
            weight.assign(value)
