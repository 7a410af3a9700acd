"""Derivatives of every order, by `multigrad.grad` on each backend."""

import pytest
from cases import CASES
from keras import ops
from support import array, close

from multigrad import grad

X, W = array(0.5, -1.25, 1.5), array(0.75, 1.0, -0.5)


def directional(function, order):
    """A sum of derivatives of this order: each one is the gradient of the weighted sum of the last."""

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
def test_order(case, order, around):
    got = directional(lambda x, w: around(case.op(x, w)), order)(X, W)
    close(got, directional(lambda x, w: around(case.meant(x, w)), order)(X, W), 1e-4)
