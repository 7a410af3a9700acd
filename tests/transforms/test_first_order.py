"""`higher_order=False`: what a rule uses is all that is kept, and a second derivative is no silent zero."""

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


def test_what_needs_no_second_run_has_every_order():
    """A rule that uses inputs alone: by it, the derivative of 7 x u is 7, and nothing was kept for that."""
    op = op_custom_gradient(lambda x: (x + 10.0, lambda upstream: 7.0 * upstream * x), higher_order=False)
    close(grad(grad(op))(3.0), array(7.0))


@pytest.mark.parametrize("around", [lambda y: y, lambda y: y * y], ids=["alone", "inside"])
def test_the_second_derivative(around):
    second = grad(grad(lambda x: around(seven(x))))
    if BACKEND == "torch":
        expected = r"(?s)seven: the gradient cannot be differentiated again.*higher_order=True"
        with pytest.raises(RuntimeError, match=expected):
            second(0.0)
    else:
        usual = op_custom_gradient(with_rule)
        close(second(0.0), grad(grad(lambda x: around(usual(x))))(0.0))


def test_beside_a_term_that_has_one():
    """What is no derivative must not be taken for zero, where there is another term to differentiate."""
    penalty = grad(lambda x: grad(seven)(x) + x**3)
    if BACKEND == "torch":
        with pytest.raises(RuntimeError, match="higher_order=True"):
            penalty(2.0)
    else:
        assert float(penalty(2.0)) > 12.0


def test_by_what_the_function_closes_over():
    def gradient(w):
        def with_rule(x):
            e = x * w
            return e + 10.0, lambda upstream: 7.0 * upstream * e

        return grad(op_custom_gradient(with_rule, higher_order=False))(2.0)

    penalty = grad(lambda w: gradient(w) + w**3)
    if BACKEND == "torch":
        with pytest.raises(RuntimeError, match="higher_order=True"):
            penalty(2.0)
    else:
        close(penalty(2.0), array(26.0))
