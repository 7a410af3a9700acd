"""Tensors that are one object: the gradient of each position is its own."""

import keras
import numpy as np
import pytest
from cases import WRITTEN, each_of, weighted
from forms import in_form
from keras import ops
from support import BACKEND, array, close, compiled, numpy

import multigrad
from multigrad import grad, op_custom_gradient

VALUES = [0.5, -0.25, 1.0]
X = array(VALUES)


def copies(*tensors):
    """Return the tensors as arrays of their own."""
    return [array(np.array(numpy(tensor))) for tensor in tensors]


each_case = pytest.mark.parametrize("written", WRITTEN, ids=[written.name for written in WRITTEN])


def twice(function):
    """Return the first and the second derivative with respect to an argument that is passed twice."""
    first = grad(lambda x: weighted(function)(x, x))
    return first, grad(lambda x: ops.sum(first(x) ** 2))


@each_of()
def test_an_argument_that_is_passed_twice(case):
    for got, wanted in zip(twice(case.op), twice(case.meant), strict=True):
        close(got(X), wanted(X), 1e-3)
        close(compiled(got)(X), wanted(X), 1e-3)


@pytest.mark.parametrize("form", ["reader", "method that reads"])
@each_case
def test_a_weight_that_holds_the_array_of_an_input(written, form):
    """Random programs also draw several weights with one array, and ways to differentiate them."""
    case, apart = in_form(form, written, array(0.8, 0.9, 1.1)), in_form(form, written, np.float32(VALUES))
    case.weights[0].assign(X)

    def gradients(case, function, x, w):
        loss = weighted(function)
        of_both = keras.tree.flatten(grad(loss, (0, 1), variables=case.weights)(x, w))
        return of_both, grad(loss)(x, w), grad(lambda: loss(x, w), variables=case.weights)()

    close(gradients(case, case.op, X, X), gradients(apart, apart.meant, *copies(X, X)), 1e-3)


# ------------------------------------------------------------------------------------------- ops in rules


@op_custom_gradient
def squared(x, w):
    return x * w, lambda u: (5.0 * u * w, 7.0 * u * x)


@op_custom_gradient
def passed(x):
    return x, lambda u: 3.0 * u


@op_custom_gradient
def with_ops_in_rule(x, w):
    """An op whose rule passes one tensor twice to an op, and applies an op whose output is its input."""
    return x * w, lambda u: (u * squared(x, x), 2.0 * u * passed(w))


def jit(function):
    return multigrad.jit(function, **({"backend": "aot_eager"} if BACKEND == "torch" else {}))


@pytest.mark.parametrize("wrap", [lambda f: f, jit], ids=["eager", "compiled"])
def test_an_op_in_a_rule_has_one_array_in_two_places(wrap):
    def slope(x):
        return ops.sum(grad(lambda x: ops.sum(with_ops_in_rule(x, x)))(x))

    close(wrap(grad(lambda x: ops.sum(with_ops_in_rule(x, x))))(X), X**2 + 2.0 * X)
    close(wrap(grad(slope))(X), 12.0 * X + 6.0)


def test_a_compiled_step_has_one_array_in_two_places_of_an_op_in_a_rule():
    weight = keras.Variable(np.ones(3, "float32"))

    @op_custom_gradient
    def read(x):
        def rule(u, variables):
            (w,) = variables
            return u * passed(w), [u * squared(w, w) + u * passed(x)]

        return x * weight, rule

    step = jit(multigrad.value_and_grad(lambda x: ops.sum(read(x)), variables=[weight]))
    for value in (1.0, 2.0):
        weight.assign([value] * 3)
        close(step(X), (ops.sum(value * X), [value**2 + X]))
