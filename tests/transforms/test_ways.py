"""Random programs, differentiated twice in two of the framework's ways, which are drawn too.

A way makes of a function of tensors, whose value is a number, the function of its gradients, which may be
differentiated in another way. The tables of them are in `ways_on_jax.py` and its like, with the pairs that
the framework itself is without.
"""

import importlib
import itertools
from random import Random

import numpy as np
import programs
from hypothesis import event, given
from hypothesis import strategies as st
from meanings import function_of, inputs_of, numbers, weighted, with_ops, without_ops
from support import BACKEND

from multigrad import backend, grad

PROGRAMS = st.randoms(use_true_random=False).map(lambda r: programs.draw(r, ["float32", "float64"]))


def by_multigrad(loss):
    return lambda *xs: grad(loss, tuple(range(len(xs))))(*xs)


own = importlib.import_module(f"ways_on_{BACKEND}")
WAYS = {"multigrad.grad": by_multigrad, **own.WAYS}
PAIRS = [pair for pair in itertools.product(WAYS, WAYS) if pair not in own.LACKING]


def derivatives(program, made, outer, inner):
    """The first derivatives by the inner way, and the second by the outer one."""
    function, inputs = function_of(program, made), inputs_of(program)
    first = inner(lambda *xs: weighted([*xs, *function(*xs)], 0))
    second = outer(lambda *xs: weighted([*xs, *first(*xs)], 1))
    return [*first(*inputs), *second(*inputs)]


@given(PROGRAMS)
def test_the_way_makes_no_difference(program):
    # Of all pairs alike, where hypothesis would mostly draw the first.
    outer, inner = Random(repr(program)).choice(PAIRS)
    event(f"{outer} of {inner}")
    with backend.active.wide():
        got = derivatives(program, with_ops, WAYS[outer], WAYS[inner])
        with backend.active.uncompiled():
            wanted = derivatives(program, without_ops, by_multigrad, by_multigrad)
        # Not the dtypes: the gradient of a float64 value by forward mode is one itself.
        assert [tuple(tensor.shape) for tensor in got] == [tuple(tensor.shape) for tensor in wanted]
        got, wanted = numbers(got), numbers(wanted)
    size = np.max(np.abs(wanted), initial=1.0)
    np.testing.assert_allclose(got, wanted, rtol=0.0, atol=1e-4 * size, err_msg=f"{outer} of {inner}")
