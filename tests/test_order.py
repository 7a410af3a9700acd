"""Second and third derivatives, through the closure of a rule, and by the rule."""

import numpy as np
import pytest
from keras import ops
from support import array, close, compiled, numpy

from multigrad import grad, op_custom_gradient


def times(f, order):
    for _ in range(order):
        f = grad(f)
    return f


@op_custom_gradient
def by_input(x):
    return x**3, lambda u: u * 3 * x**2


@op_custom_gradient
def by_intermediate(x):
    e = x**2
    return e * x, lambda u: u * 3 * e


@op_custom_gradient
def by_output(x):
    y = ops.exp(x)
    return y, lambda u: u * 3.0 * y


@op_custom_gradient
def by_container(x):
    parts = {"square": [x**2]}
    return parts["square"][0] * x, lambda u: u * 3 * parts["square"][0]


@op_custom_gradient
def by_inner_function(x):
    e = x**2

    def factor(k):
        return k * e

    return e * x, lambda u: u * factor(3)


@op_custom_gradient
def by_nested_op(x):
    y = by_intermediate(x)
    return y * 1.0, lambda u: u * 3 * y / x


@op_custom_gradient
def by_attribute_of_a_function(x):
    def inner():
        return inner.e

    inner.e = x**2
    return inner.e * x, lambda u: u * inner.e * 3.0


CUBES = [
    by_input,
    by_intermediate,
    by_container,
    by_inner_function,
    by_nested_op,
    by_attribute_of_a_function,
]
# Of the cube, and of `cube(2 x)**2`, which is `64 x**6`, at 1.5.
ALONE = (3 * 1.5**2, 6 * 1.5, 6.0)
IN_A_GRAPH = (384 * 1.5**5, 1920 * 1.5**4, 7680 * 1.5**3)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
@pytest.mark.parametrize("cube", CUBES)
def test_true_rules_have_true_derivatives(cube, wrap):
    for order in (1, 2, 3):
        close(wrap(times(cube, order))(array(1.5)), array(ALONE[order - 1]))
        close(
            wrap(times(lambda x: cube(x * 2.0) ** 2, order))(array(1.5)), array(IN_A_GRAPH[order - 1]), 1e-4
        )


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


def test_a_hessian_vector_product_over_two_arguments():
    @op_custom_gradient
    def product(x, y):
        e = x * y
        return e * x, lambda u: (u * 2 * e, u * x**2 * 5.0)

    def loss(x, y):
        return ops.sum(product(x, y))

    def directional(x, y):
        gx, gy = grad(loss, (0, 1))(x, y)
        return ops.sum(gx * 2.0 + gy * 3.0)

    x, y = np.float32([1.0, 2.0]), np.float32([3.0, 4.0])
    close(grad(directional, (0, 1))(x, y), (array(4 * y + 30 * x), array(4 * x)))


def test_first_order_runs_the_function_once():
    calls = []

    @op_custom_gradient
    def op(x):
        calls.append(1)
        e = ops.exp(x)
        return e * 1.0, lambda u: u * e

    grad(lambda x: ops.sum(op(x)))(np.ones(3, "float32"))
    assert calls == [1]


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


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_an_output_and_an_intermediate_in_one_rule(wrap):
    """f = exp(x^2) with the rule 3 u f e, where e = x^2: d/dx of 3 f e is 9 f e^2 + 6 f x."""

    @op_custom_gradient
    def op(x):
        e = x**2
        y = ops.exp(e)
        return y, lambda u: u * y * 3.0 * e

    x = 1.2
    e, y = x**2, np.exp(x**2)
    close(wrap(times(op, 2))(array(x)), array(9 * y * e**2 + 6 * y * x), 1e-4)


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
