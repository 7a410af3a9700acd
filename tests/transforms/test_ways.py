"""Random programs, differentiated twice, by two random ways of the framework.

The ways are listed in `ways.py`, and in `ways_on_jax.py` and similar files, with the pairs that the framework
does not support.
"""

import os
from random import Random

import numpy as np
import programs
from hypothesis import event, given
from hypothesis import strategies as st
from meanings import function_of, inputs_of, numbers, weighted, with_ops, without_ops
from ways import PAIRS, WAYS, by_multigrad

from multigrad import backend

# JAX and TensorFlow take seconds for the second derivatives of four calls, which the full run has.
MOST_CALLS = 4 if int(os.environ.get("MULTIGRAD_EXAMPLES", "2")) > 2 else 2
PROGRAMS = st.randoms(use_true_random=False).map(
    lambda random: programs.draw(random, ["float32", "float64"], MOST_CALLS)
)


def derivatives(program, made, outer, inner):
    """Return the first derivatives by the inner way, and the second derivatives by the outer way."""
    function, inputs = function_of(program, made), inputs_of(program)
    first = inner(lambda *xs: weighted([*xs, *function(*xs)], 0))
    second = outer(lambda *xs: weighted([*xs, *first(*xs)], 1))
    return [*first(*inputs), *second(*inputs)]


@given(PROGRAMS)
def test_all_ways_give_the_same_derivatives(program):
    # Drawn uniformly from all pairs. hypothesis would mostly draw the first.
    outer, inner = Random(repr(program)).choice(PAIRS)
    event(f"{outer} of {inner}")
    with backend.active.wide():
        got = derivatives(program, with_ops, WAYS[outer], WAYS[inner])
        with backend.active.without_compilation():
            wanted = derivatives(program, without_ops, by_multigrad, by_multigrad)
        # Without dtypes: in forward mode, the gradient of a float64 value is float64.
        assert [tuple(tensor.shape) for tensor in got] == [tuple(tensor.shape) for tensor in wanted]
        got, wanted = numbers(got), numbers(wanted)
    size = np.max(np.abs(wanted), initial=1.0)
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-4 * size, err_msg=f"{outer} of {inner}")
