"""The cost of a call, as counts that are equal on every machine: below a bound, and linear."""

from importlib.metadata import version

import pytest
from by_hand import PAIRS, log1pexp
from counts import calls_of
from keras import ops
from support import BACKEND, array

from multigrad import op_custom_gradient

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
    """As many more leaves add as many more calls."""

    def calls_for(count):
        xs = [array(float(i), 1.0) for i in range(count)]
        calls_of(op, xs)
        return calls_of(op, xs)

    def op(*xs):
        return tuple(of_many([{"x": x, "kind": "static"} for x in xs]))

    forward, backward = zip(*map(calls_for, (10, 20, 30)), strict=True)
    for few, more, most in (forward, backward):
        assert most - more == more - few > 0
