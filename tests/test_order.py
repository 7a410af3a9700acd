"""Second and third derivatives, through the closure of a rule, and by the rule."""

import pytest
from keras import ops
from support import array, close, compiled, numpy

from multigrad import grad, op_custom_gradient


def times(f, order):
    for _ in range(order):
        f = grad(f)
    return f


@op_custom_gradient
def by_output(x):
    y = ops.exp(x)
    return y, lambda u: u * 3.0 * y


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_the_rule_applies_at_every_order(wrap):
    """f = x + 10 with the rule -1.1 u: by the rule, d/dx f = -1.1."""
    op = op_custom_gradient(lambda x: (x + 10.0, lambda u: -1.1 * u))
    x, y, d = array(1.0), 11.0, -1.1
    for order, wanted in ((1, 4 * y**3 * d), (2, 12 * y**2 * d**2), (3, 24 * y * d**3)):
        close(wrap(times(lambda x: op(x) ** 4, order))(x), array(wanted), 1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_an_output_in_the_rule_is_differentiated_by_the_rule(wrap):
    """f = exp with the rule 3 u f: each order adds a factor of three."""
    for order in (1, 2, 3):
        close(wrap(times(by_output, order))(array(0.0)), array(3.0**order))


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_an_output_that_is_an_input_counts_as_the_input_in_the_rule(wrap):
    """f = x with the rule u x^2: the derivative of x in the rule is one, not the derivative by the rule."""
    op = op_custom_gradient(lambda x: (x, lambda u: u * x**2))
    close(wrap(times(op, 2))(array(3.0)), array(6.0))
    # d/dx of 2 y x^2 = 2 x^2 x^2 + 4 y x
    close(wrap(times(lambda x: op(x) ** 2, 2))(array(3.0)), array(2 * 81.0 + 4 * 9.0))


def test_mixed_orders_with_some_differentiated_inputs():
    @op_custom_gradient
    def op(x, y):
        e = x * y
        return e * 1.0, lambda u: (u * y * 3.0, u * e)

    close(grad(grad(lambda y: op(array(2.0), y)))(5.0), array(2.0))
    close(grad(lambda x: grad(op, 1)(x, 5.0))(2.0), array(5.0))
    assert float(numpy(grad(grad(op))(2.0, 5.0))) == 0.0


ANSWERS = {
    "a tuple": lambda x, y: lambda u: (u * y * 3.0, u * x * 5.0, None),
    "a dict": lambda x, y: lambda u: {"x": u * y * 3.0, "y": u * x * 5.0},
    "lazy": lambda x, y: lambda u: (lambda: u * y * 3.0, lambda: u * x * 5.0),
    "a cast": lambda x, y: lambda u: (ops.cast(u * y * 3.0, "float16"), u * x * 5.0),
    "broadcast": lambda x, y: lambda u: (ops.stack([u * y * 1.0, u * y * 2.0]), u * x * 5.0),
}


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize("answer", ANSWERS)
def test_mixed_derivatives(answer, wrap):
    """f = x y with the rule (3 u y, 5 u x): of f squared, d/dx is 6 f y, and d/dy of that 6 f + 30 x y."""

    @op_custom_gradient
    def op(x, y, n=4):
        return x * y, ANSWERS[answer](x, y)

    def mixed(x, y):
        return grad(lambda y: grad(lambda x: op(x, y) ** 2)(x))(y)

    x, y = 2.0, 3.0
    close(wrap(mixed)(array(x), array(y)), array(6 * x * y + 30 * x * y))
    # By the rule, d/dy of f is 5 x: the derivative of 6 f + 30 x y is 30 x + 30 x.
    close(wrap(grad(mixed, 1))(array(x), array(y)), array(60 * x))


def test_an_output_that_is_returned_twice_counts_as_the_first():
    @op_custom_gradient
    def op(x):
        y = ops.exp(x)
        return (y, y), lambda u, v: (3.0 * u + 5.0 * v) * y

    close(times(lambda x: op(x)[0], 2)(array(0.0)), array(9.0))


def test_an_op_within_an_op_that_returns_its_argument():
    """The rule closes over the output of the inner op, which is differentiated by the inner rule."""
    same = op_custom_gradient(lambda x: (x, lambda u: u * 7.0))

    @op_custom_gradient
    def op(x):
        e = same(x)
        return e * x, lambda u: u * e * x

    close(grad(op)(0.5), array(0.25))
    close(grad(grad(op))(0.5), array(7.0 * 0.5 + 0.5))
