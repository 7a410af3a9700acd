"""Properties of all ops, on random programs: `programs.py` draws them, `meanings.py` runs them.

The environment variable MULTIGRAD_EXAMPLES is the number of programs.
"""

from random import Random

import numpy as np
import programs
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from keras import tree
from meanings import (
    described,
    fill,
    found,
    function_of,
    gradients_of,
    inputs_of,
    numbers,
    weighted,
    with_ops,
    without_ops,
)
from programs import Program, in_other_forms, with_true_rules
from support import slow_on

from multigrad import backend, grad
from multigrad.core import call
from multigrad.testing import check_gradients

RANDOM = st.randoms(use_true_random=False)
PROGRAMS = RANDOM.map(programs.draw)
PRECISE = RANDOM.map(lambda random: programs.draw(random, ["float32", "float64"]))

# The tolerance for the results of a program, relative to the largest. A rule may return float32.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 0.05, "bfloat16": 0.2}


@pytest.fixture(autouse=True, scope="module")
def eager():
    """Use double precision, and no compilation, because JAX would compile most operations separately."""
    with backend.active.wide(), backend.active.without_compilation():
        yield


def agree(program: Program, got, wanted) -> None:
    """Assert that tensors have equal dtypes, shapes and values."""
    assert described(got) == described(wanted)
    tolerance = TOLERANCES[program.precision]
    got, wanted = numbers(got), numbers(wanted)
    size = np.max(np.abs(wanted), initial=1.0)
    if not np.all(np.isfinite(wanted)):  # float16 may overflow
        reject()
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=tolerance * size)


@slow_on("jax")
@given(PRECISE)
def test_a_true_rule_has_the_gradient_of_central_differences(program):
    program = with_true_rules(program)
    function = function_of(program, with_ops)

    def whole(
        *inputs,
    ):  # the whole output, because differences have no precision for elements that are nearly zero
        return 10.0 + weighted([*inputs, *function(*inputs)], 0)

    check_gradients(whole, *inputs_of(program), compiled=False)


@slow_on("jax")
@given(PROGRAMS)
def test_a_false_rule_equals_a_plain_function_with_the_same_derivative(program):
    """Compare values, two derivatives, dtypes and shapes. In low precision, compare only one derivative."""
    both = zip(gradients_of(program, with_ops), gradients_of(program, without_ops), strict=True)
    for got, wanted in both:
        agree(program, got, wanted)


@given(PROGRAMS, RANDOM)
def test_all_forms_of_a_rule_are_equivalent(program, random):
    other = in_other_forms(random, program)
    both = zip(gradients_of(program, with_ops), gradients_of(other, with_ops), strict=True)
    for got, wanted in both:
        agree(program, got, wanted)


@given(PROGRAMS)
def test_a_gradient_has_the_structure_and_the_dtypes_of_its_argument(program):
    """`meanings.py` checks the outputs of every call of an op."""
    function = function_of(program, with_ops)
    argument = fill(program.structure, inputs_of(program))

    def loss(argument):
        leaves, _ = found(program.structure, argument)
        return weighted(function(*[leaves[i] for i in range(len(leaves))]), 0)

    gradient = grad(loss)(argument)
    tree.assert_same_structure(gradient, argument)
    assert described(tree.flatten(gradient)) == described(tree.flatten(argument))


@pytest.mark.parametrize(
    "law",
    [
        test_a_true_rule_has_the_gradient_of_central_differences,
        test_a_false_rule_equals_a_plain_function_with_the_same_derivative,
    ],
)
def test_exchanged_gradients_are_found(law, monkeypatch):
    read = call.read

    def swapped(*args):
        gradients = read(*args)
        both = len(gradients) == 2 and all(gradient is not None for gradient in gradients)
        return gradients[::-1] if both and len(set(described(gradients))) == 1 else gradients

    monkeypatch.setattr(call, "read", swapped)
    program = programs.draw(
        Random(64), ["float32"]
    )  # a program with a call whose two arguments have the same shape
    with pytest.raises(AssertionError, match=r"differs from the central differences|Not equal to tolerance"):
        law.hypothesis.inner_test(program)
