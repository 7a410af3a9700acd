"""The cost of a call, as counts that are equal on every machine: below a bound, and linear."""

import functools
import itertools
from importlib.metadata import version

import pytest
from by_hand import PAIRS, log1pexp
from counts import calls, calls_of
from keras import ops
from support import BACKEND, array, close

from multigrad import grad, op_custom_gradient

# A fifth more than the calls in the forward and the backward passes of all pairs.
MOST = {"jax": 1114, "tensorflow": 882, "torch": 605}


def calls_that_are_not_the_first(pair):
    calls_of(pair.op, pair.arguments())
    found = {calls_of(pair.op, pair.arguments()) for _ in range(10)}
    assert len(found) == 1  # they do not grow with calls
    return sum(found.pop())


@pytest.mark.skipif(
    BACKEND == "jax" and not version("jax").startswith("0.10."),
    reason="the bound is that of the primitive for JAX 0.10; in other versions an op is a jax.custom_vjp",
)
def test_the_calls_are_within_their_bound():
    assert sum(map(calls_that_are_not_the_first, PAIRS.values())) <= MOST[BACKEND]


def define(factor):
    @op_custom_gradient
    def op(x):
        e = ops.exp(x)
        return e * factor, lambda u: u * e * 7.0

    return op


def test_counts_do_not_grow_with_earlier_ops():
    """The counts do not grow either if an op is defined in every call."""
    x = [array(0.5, 1.0)]
    calls_of(define(1.0), x)
    one, first = log1pexp, calls_of(define(2.0), x)
    calls_of(one, x)
    before = calls_of(one, x)
    for i in range(200):
        assert calls_of(define(float(i)), x) == first
    assert calls_of(one, x) == before


@op_custom_gradient
def of_many(inputs):
    def rule(us):
        return [{"x": 7.0 * u, "kind": None} for u in us]

    return [2.0 * leaf["x"] for leaf in inputs], rule


def test_counts_are_linear_in_leaves():
    def calls_for(count):
        xs = [array(float(i), 1.0) for i in range(count)]
        calls_of(op, xs)
        return calls_of(op, xs)

    def op(*xs):
        return tuple(of_many([{"x": x, "kind": "static"} for x in xs]))

    require_linear([calls_for(count) for count in (10, 20, 30, 40)])


def require_linear(counts):
    """Assert that steps of equal length add an equal, positive number of calls."""
    steps = {tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(counts)}
    assert len(steps) == 1, counts
    assert min(steps.pop()) > 0, counts


@op_custom_gradient
def by_intermediate(x):
    e = ops.exp(x)
    return e * 1.0, lambda u: 3.0 * e * u


def test_counts_are_linear_in_the_order():
    """The counts are linear from the third order on. A first derivative is not recorded, and PyTorch runs the
    function again for a second one."""

    def counts():
        derivative, x = by_intermediate, array(0.5)
        for _ in range(6):
            derivative = grad(derivative)
            close(derivative(x), 3.0 * ops.exp(x), 1e-4)
            yield calls(functools.partial(derivative, x))[:1]

    require_linear(list(counts())[2:])
