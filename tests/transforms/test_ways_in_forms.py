"""Ops in every form, differentiated in every way of the framework. Random programs draw pairs of ways."""

import keras
import pytest
from cases import BLACK_BOXES, CASES, IN_OTHER_FORMS, weighted
from keras import ops
from support import array, close, numpy
from ways import EVERY_PAIR, EVERY_WAY, by_multigrad, own

X, W = array(0.5, -0.25, 1.0), array(0.75, 1.0, -0.5)

# Each case as a function is in the tests of the transforms.
NAMES = ("input", "intermediate", "output", "two outputs", "structure")
FORMED = {id_: case for id_, case in IN_OTHER_FORMS.items() if case.name in NAMES}


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


def each_of(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


each_way = pytest.mark.parametrize("way", EVERY_WAY)


@each_way
@each_of(FORMED)
def test_each_way(way, case):
    """The weights keep their own values."""
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)


@each_way
@each_of({id_: case for id_, case in FORMED.items() if case.weights})
def test_each_way_with_respect_to_a_weight(way, case):
    loss, meant, inputs = with_weights(case)
    close(list(EVERY_WAY[way](loss)(*inputs)), list(by_multigrad(meant)(*inputs)), 1e-4)


# ----------------------------------------------------------------------------- functions without a derivative

COMPILABLE = {id_: case for id_, case in BLACK_BOXES.items() if case.name != "NumPy"}
HOST_CALL_WAYS = [way for way in EVERY_WAY if way not in own.LACKING_OF_HOST_CALLS]


@pytest.mark.parametrize("way", HOST_CALL_WAYS)
@each_of(COMPILABLE)
def test_a_function_without_a_derivative(way, case):
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)
    if case.weights:
        loss, meant, inputs = with_weights(case)
        close(list(EVERY_WAY[way](loss)(*inputs)), list(by_multigrad(meant)(*inputs)), 1e-4)


@pytest.mark.parametrize("way", ["multigrad.grad", *own.EAGER])
@each_of({id_: case for id_, case in BLACK_BOXES.items() if case.name == "NumPy"})
def test_a_function_of_numpy_arrays(way, case):
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)


def second(way, case):
    """Return the second derivatives of a case by a way, the loss that it means, and its inputs."""
    loss, meant, inputs = with_weights(case)
    return twice(EVERY_WAY[way], EVERY_WAY[way], loss), meant, inputs


@pytest.mark.parametrize("way", [way for way in HOST_CALL_WAYS if (way, way) in EVERY_PAIR])
@each_of({id_: case for id_, case in COMPILABLE.items() if case.name != "intermediate"})
def test_a_second_derivative_by_inputs_and_outputs(way, case):
    got, meant, inputs = second(way, case)
    close(list(got(*inputs)), list(twice(by_multigrad, by_multigrad, meant)(*inputs)), 1e-3)


@pytest.mark.parametrize("way", ["multigrad.grad", *own.EAGER])
@each_of({id_: case for id_, case in COMPILABLE.items() if case.name == "intermediate"})
def test_a_second_derivative_by_an_intermediate_result_raises(way, case):
    got, _, inputs = second(way, case)
    with pytest.raises((TypeError, NotImplementedError), match=r"no derivative(.|\n)*fix: "):
        got(*inputs)


def test_the_forms_are_those_of_the_cases():
    assert {case.name for case in FORMED.values()} == set(NAMES) <= CASES.keys()
