"""Ops in every form, differentiated in every way of the framework. Random programs draw pairs of ways."""

import keras
import pytest
from cases import BLACK_BOXES, IN_OTHER_FORMS, W, X, weighted
from keras import ops
from support import array, close, numpy
from ways import EVERY_PAIR, EVERY_WAY, by_multigrad, own

# Each case as a function is in the tests of the transforms.
FORMED = {
    name: case
    for name, case in IN_OTHER_FORMS.items()
    if case.name in ("input", "intermediate", "output", "two outputs", "structure")
}
OF_NUMPY = {name: case for name, case in BLACK_BOXES.items() if case.name == "NumPy"}
OF_HOST = {name: case for name, case in BLACK_BOXES.items() if case.name != "NumPy"}
HOST_CALL_WAYS = [way for way in EVERY_WAY if way not in own.LACKING_OF_HOST_CALLS]
EAGER_WAYS = ["multigrad.grad", *own.EAGER]


def with_weights(case):
    """Return the losses of both functions of a case, the weights of which are arguments."""

    def stateless(function):
        def loss(x, w, *values):
            with keras.StatelessScope(zip(case.weights, values, strict=True)):
                return weighted(function)(x, w)

        return loss

    values = [array(numpy(weight)) for weight in case.weights]
    return stateless(case.op), stateless(case.meant), [0.5 * X, W, *values]


def each_of(cases):
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


def check(way, case):
    """Compare the gradients by a way, also with respect to the weights, with those of the plain function."""
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)
    if case.weights:
        loss, meant, inputs = with_weights(case)
        close(list(EVERY_WAY[way](loss)(*inputs)), list(by_multigrad(meant)(*inputs)), 1e-4)


@pytest.mark.parametrize("way", EVERY_WAY)
@each_of(FORMED)
def test_each_way(way, case):
    check(way, case)


@pytest.mark.parametrize("way", HOST_CALL_WAYS)
@each_of(OF_HOST)
def test_a_function_without_a_derivative(way, case):
    check(way, case)


@pytest.mark.parametrize("way", EAGER_WAYS)
@each_of(OF_NUMPY)
def test_a_function_of_numpy_arrays(way, case):
    got = EVERY_WAY[way](weighted(case.op))(X, W)
    close(list(got), list(by_multigrad(weighted(case.meant))(X, W)), 1e-4)


def twice(way, loss):
    def slope(*xs):
        return sum([ops.sum(ops.cos(0.5 + i) * gradient) for i, gradient in enumerate(way(loss)(*xs))])

    return way(slope)


@pytest.mark.parametrize("way", [way for way in HOST_CALL_WAYS if (way, way) in EVERY_PAIR])
@each_of({name: case for name, case in OF_HOST.items() if case.name != "intermediate"})
def test_a_second_derivative_by_inputs_and_outputs(way, case):
    loss, meant, inputs = with_weights(case)
    close(list(twice(EVERY_WAY[way], loss)(*inputs)), list(twice(by_multigrad, meant)(*inputs)), 1e-3)


@pytest.mark.parametrize("way", EAGER_WAYS)
@each_of({name: case for name, case in OF_HOST.items() if case.name == "intermediate"})
def test_a_second_derivative_by_an_intermediate_result_raises(way, case):
    loss, _, inputs = with_weights(case)
    with pytest.raises((TypeError, NotImplementedError), match=r"no derivative(.|\n)*fix: "):
        twice(EVERY_WAY[way], loss)(*inputs)
