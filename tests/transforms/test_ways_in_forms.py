"""Ops in every form, differentiated in every way of the framework, once and twice."""

import keras
import pytest
from cases import BLACK_BOXES, CASES, IN_OTHER_FORMS
from keras import ops
from support import BACKEND, array, close, numpy
from ways import EVERY_PAIR, EVERY_WAY, by_multigrad, own

X, W = array(0.5, -0.25, 1.0), array(0.75, 1.0, -0.5)

# Each case as a function is in the tests of the transforms.
NAMES = ("input", "intermediate", "output", "two outputs", "structure")
FAST = ["intermediate-method that reads", *(["intermediate-method"] if BACKEND != "jax" else [])]
FORMED = {id_: case for id_, case in IN_OTHER_FORMS.items() if case.name in NAMES}


def weighted(function):
    return lambda x, w: ops.sum(ops.sin(function(x, w)) * array(1.0, -2.0, 0.5))


def with_weights(case):
    """Return the losses of both functions of a case, the weights of which are arguments."""

    def stateless(function):
        def loss(x, w, *values):
            with keras.StatelessScope(zip(case.weights, values, strict=True)):
                return weighted(function)(x, w)

        return loss

    values = [array(numpy(weight)) for weight in case.weights]
    return stateless(case.op), stateless(case.meant), [X, W, *values]


def twice(outer, inner, loss):
    def slope(*xs):
        return sum([ops.sum(ops.cos(0.5 + i) * gradient) for i, gradient in enumerate(inner(loss)(*xs))])

    return outer(slope)


def product_of(names, cases, fast, lacking=frozenset()):
    """Return parameters of a test, of which those with a `fast` case are in the fast run."""
    return [
        pytest.param(name, case, id=f"{id_}-{name}", marks=() if id_ in fast else pytest.mark.slow)
        for id_, case in cases.items()
        for name in names
        if name not in lacking
    ]


@pytest.mark.parametrize(("way", "case"), product_of(EVERY_WAY, FORMED, FAST))
def test_each_way(way, case):
    """The weights keep their own values."""
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)


@pytest.mark.parametrize(
    ("way", "case"),
    product_of(EVERY_WAY, {i: c for i, c in FORMED.items() if c.weights}, ["intermediate-method that reads"]),
)
def test_each_way_with_respect_to_a_weight(way, case):
    loss, meant, inputs = with_weights(case)
    close(list(EVERY_WAY[way](loss)(*inputs)), list(by_multigrad(meant)(*inputs)), 1e-4)


def pairs_in_forms():
    """Return each pair of ways with three cases. The fast run has a few pairs with one case.

    Random programs draw from all pairs.
    """
    parameters = []
    for i, (outer, inner) in enumerate(EVERY_PAIR):
        for j, id_ in enumerate(["intermediate-method that reads", "output-reader", "input-method"]):
            is_fast = i % (len(EVERY_PAIR) // 8) == 0 and i % 3 == j
            marks = () if is_fast else pytest.mark.slow
            title = f"{id_}-{outer}-{inner}"
            parameters.append(pytest.param(outer, inner, FORMED[id_], id=title, marks=marks))
    return parameters


@pytest.mark.parametrize(("outer", "inner", "case"), pairs_in_forms())
def test_each_pair_of_ways(outer, inner, case):
    loss, meant, inputs = with_weights(case)
    got = twice(EVERY_WAY[outer], EVERY_WAY[inner], loss)(*inputs)
    close(list(got), list(twice(by_multigrad, by_multigrad, meant)(*inputs)), 1e-3)


# ----------------------------------------------------------------------------- functions without a derivative

COMPILABLE = {id_: case for id_, case in BLACK_BOXES.items() if case.name != "NumPy"}
HOST_CALL_WAYS = [way for way in EVERY_WAY if way not in own.LACKING_OF_HOST_CALLS]


@pytest.mark.parametrize(
    ("way", "case"),
    product_of(HOST_CALL_WAYS, COMPILABLE, FAST),
)
def test_a_function_without_a_derivative(way, case):
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)
    if case.weights:
        loss, meant, inputs = with_weights(case)
        close(list(EVERY_WAY[way](loss)(*inputs)), list(by_multigrad(meant)(*inputs)), 1e-4)


@pytest.mark.parametrize(
    ("way", "case"),
    product_of(
        ["multigrad.grad", *own.EAGER],
        {id_: case for id_, case in BLACK_BOXES.items() if case.name == "NumPy"},
        BLACK_BOXES,
    ),
)
def test_a_function_of_numpy_arrays(way, case):
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)


def second(way, case):
    """Return the second derivatives of a case by a way, the loss that it means, and its inputs."""
    loss, meant, inputs = with_weights(case)
    return twice(EVERY_WAY[way], EVERY_WAY[way], loss), meant, inputs


@pytest.mark.parametrize(
    ("way", "case"),
    product_of(
        [way for way in HOST_CALL_WAYS if (way, way) in EVERY_PAIR],
        {id_: case for id_, case in COMPILABLE.items() if case.name != "intermediate"},
        ["output-method that reads"] if BACKEND != "jax" else [],
    ),
)
def test_a_second_derivative_by_inputs_and_outputs(way, case):
    got, meant, inputs = second(way, case)
    close(list(got(*inputs)), list(twice(by_multigrad, by_multigrad, meant)(*inputs)), 1e-3)


@pytest.mark.parametrize(
    ("way", "case"),
    product_of(
        ["multigrad.grad", *own.EAGER],
        {id_: case for id_, case in COMPILABLE.items() if case.name == "intermediate"},
        COMPILABLE,
    ),
)
def test_a_second_derivative_by_an_intermediate_result_raises(way, case):
    got, _, inputs = second(way, case)
    with pytest.raises((TypeError, NotImplementedError), match=r"no derivative(.|\n)*fix: "):
        got(*inputs)


def test_the_forms_are_those_of_the_cases():
    assert {case.name for case in FORMED.values()} == set(NAMES) <= CASES.keys()
