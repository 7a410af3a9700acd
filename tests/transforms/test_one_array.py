"""Tensors that are one object: the gradient of each position is its own."""

import keras
import numpy as np
import pytest
from cases import WRITTEN, each_of, weighted
from forms import FORMS, in_form
from keras import ops
from support import BACKEND, array, close, compiled, numpy
from ways import EVERY_WAY, own

import multigrad
from multigrad import grad, op_custom_gradient

VALUES = [0.5, -0.25, 1.0]
X = array(VALUES)


def copies(*tensors):
    """Return the tensors as arrays of their own."""
    return [array(np.array(numpy(tensor))) for tensor in tensors]


def twice(function):
    """Return the first and the second derivative with respect to an argument that is passed twice."""
    first = grad(lambda x: weighted(function)(x, x))
    return first, grad(lambda x: ops.sum(first(x) ** 2))


@each_of()
def test_an_argument_that_is_passed_twice(case):
    for got, wanted in zip(twice(case.op), twice(case.meant), strict=True):
        close(got(X), wanted(X), 1e-3)
        close(compiled(got)(X), wanted(X), 1e-3)


@pytest.mark.parametrize("way", [way for way in EVERY_WAY if way not in own.LACKING_OF_ONE_ARRAY])
@pytest.mark.parametrize("form", FORMS)
def test_one_array_in_each_way(way, form):
    case = in_form(form, WRITTEN[0])
    got = EVERY_WAY[way](weighted(case.op))(X, X)
    close(list(got), list(grad(weighted(case.meant), (0, 1))(*copies(X, X))), 1e-4)


# ------------------------------------------------------------------------------------------------- weights


def weight_gradient(loss, weights):
    return lambda x, w: keras.tree.flatten(grad(loss, (0, 1), variables=weights)(x, w))


def orders(loss, weights, order):
    """Return the gradients with respect to arguments and weights, or those of the norm of these."""
    first = weight_gradient(loss, weights)
    return (
        first
        if order == 1
        else weight_gradient(lambda x, w: sum([ops.sum(g**2) for g in first(x, w)]), weights)
    )


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", ["reader", "method that reads"])
@pytest.mark.parametrize("written", WRITTEN, ids=[written.name for written in WRITTEN])
@pytest.mark.parametrize("second", ["another array", "the same array"])
def test_a_weight_that_holds_the_array_of_an_input(written, form, order, second):
    x = array(VALUES)
    w = x if second == "the same array" else array(0.75, 1.0, -0.5)
    case = in_form(form, written, array(0.8, 0.9, 1.1))
    apart = in_form(form, written, np.float32(VALUES))
    case.weights[0].assign(x)
    got = orders(weighted(case.op), case.weights, order)(x, w)
    close(got, orders(weighted(apart.meant), apart.weights, order)(*copies(x, w)), 1e-3)
    # Only the input is differentiated, then only the weight.
    close(grad(weighted(case.op))(x, w), grad(weighted(apart.meant))(*copies(x, w)), 1e-3)
    (of_weight,) = grad(lambda: weighted(case.op)(x, w), variables=case.weights)()
    (wanted,) = grad(lambda: weighted(apart.meant)(*copies(x, w)), variables=apart.weights)()
    close(of_weight, wanted, 1e-3)


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
