"""`higher_order=False`: only the residuals are kept, and a second derivative raises instead of being zero."""

import math

import pytest
from keras import ops
from support import BACKEND, array, close

from multigrad import grad, op_custom_gradient


def with_rule(x):
    e = ops.exp(x)
    return e + 10.0, lambda upstream: 7.0 * upstream * (e + 1.0)


seven = op_custom_gradient(with_rule, name="seven", higher_order=False)


def test_the_first_derivative():
    close(grad(seven)(0.0), array(14.0))


def test_rules_of_inputs_only_have_every_order():
    """The rule uses inputs only. By the rule, the derivative of 7 x u is 7, and nothing is kept for it."""
    op = op_custom_gradient(lambda x: (x + 10.0, lambda upstream: 7.0 * upstream * x), higher_order=False)
    close(grad(grad(op))(3.0), array(7.0))


def check(second, wanted):
    """Compare a second derivative with the wanted one. On PyTorch it raises, instead of being zero."""
    if BACKEND == "torch":
        with pytest.raises(RuntimeError, match="higher_order=True"):
            second()
    else:
        close(second(), wanted())


@pytest.mark.parametrize("around", [lambda y: y, lambda y: y * y], ids=["alone", "inside"])
def test_a_second_derivative(around):
    every_order = op_custom_gradient(with_rule)
    second, wanted = [lambda op=op: grad(grad(lambda x: around(op(x))))(0.0) for op in (seven, every_order)]
    check(second, wanted)


def test_a_sum_with_a_differentiable_term():
    """The missing derivative must not count as zero in a sum with another term."""
    penalty = grad(lambda x: grad(seven)(x) + x**3)
    check(lambda: penalty(2.0), lambda: array(7.0 * math.exp(2.0) + 12.0))


def test_closed_over_tensors():
    def gradient(w):
        def with_rule(x):
            e = x * w
            return e + 10.0, lambda upstream: 7.0 * upstream * e

        return grad(op_custom_gradient(with_rule, higher_order=False))(2.0)

    check(lambda: grad(lambda w: gradient(w) + w**3)(2.0), lambda: array(26.0))
