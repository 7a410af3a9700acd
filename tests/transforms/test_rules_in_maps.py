"""Maps of ops whose output does not depend on the mapped argument, but whose rule does."""

import numpy as np
import pytest
from keras import ops
from support import array, close, compiled

from multigrad import grad, op_custom_gradient, vmap
from multigrad.ops import stop_gradient_if

by_integer = op_custom_gradient(lambda x, k: (x * 2.0, lambda u: (u * ops.cast(k, x.dtype), None)))
by_complex = op_custom_gradient(lambda x, k: (x * 2.0, lambda u: (u * ops.real(k), None)))


def by_what_it_closes_over(x, m):
    return op_custom_gradient(lambda x: (x * 2.0, lambda u: u * m))(x)


@op_custom_gradient
def by_function(x, scale):
    return x * 2.0, lambda u: scale(u)


def by_a_default(x, m):
    return by_function(x, lambda u, by=m: u * by)


FACTORS = np.float32([2.0, 3.0, 5.0])
OPS = {
    "a condition": (lambda x, c: stop_gradient_if(c, x), np.array([True, False, False]), [0.0, 1.0, 1.0]),
    "an integer": (by_integer, np.int32([2, 3, 5]), FACTORS),
    "a complex number": (by_complex, np.complex64([2.0 + 1.0j, 3.0j, 5.0]), [2.0, 0.0, 5.0]),
    "closed over": (by_what_it_closes_over, FACTORS, FACTORS),
    "a default of an argument": (by_a_default, FACTORS, FACTORS),
}


@pytest.mark.parametrize(("op", "values", "slopes"), OPS.values(), ids=OPS)
@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_each_element_has_its_own_upstream_gradient(op, values, slopes, wrap):
    weights, values = array(1.0, 10.0, 100.0), ops.convert_to_tensor(values)

    def total(x):
        return ops.sum(vmap(op, (None, 0))(x, values) * weights)

    def squares(x):
        return ops.sum(vmap(grad(lambda x, m: op(x, m) * x), (None, 0))(x, values) * weights)

    wanted = ops.sum(array(slopes) * weights)
    close(wrap(grad(total))(array(2.0)), wanted)
    # The derivative of y + x y' is y' + y' + x y'', of which the last term is zero.
    close(wrap(grad(squares))(array(2.0)), 2.0 * wanted)
