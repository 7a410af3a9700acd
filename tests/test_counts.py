"""The cost of a call, as counts that are equal on every machine: within bounds, and linear."""

import functools
import itertools
from importlib.metadata import version

import keras
import pytest
from by_hand import PAIRS, addition, log1pexp, two_outputs
from counts import BOUNDS, PACKAGE, Counts, calls, calls_of, counted
from keras import ops
from support import BACKEND, array, close

import multigrad.core.call
from multigrad import grad, op_custom_gradient

pairs = pytest.mark.parametrize("name", PAIRS)
bounded = pytest.mark.skipif(
    BACKEND == "jax" and not version("jax").startswith("0.10."),
    reason="the bounds are those of the primitive for JAX 0.10; in other versions an op is a jax.custom_vjp",
)
some = pytest.mark.parametrize("name", ["log1pexp", "two outputs", "structure"])


def require_within_bounds(name, op):
    got, bound = counted(op, PAIRS[name].arguments()), BOUNDS[BACKEND][name]
    exceeded = {what: n for what, n in got._asdict().items() if n > getattr(bound, what)}
    assert not exceeded, f"{name}: {got} where at most {bound} is allowed"


@bounded
@pairs
def test_counts_are_within_their_bounds(name):
    require_within_bounds(name, PAIRS[name].op)


@some
def test_counts_do_not_grow_with_calls(name):
    op, arguments = PAIRS[name].op, PAIRS[name].arguments()
    calls_of(op, arguments)
    assert len({calls_of(op, arguments) for _ in range(20)}) == 1


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


@pytest.mark.parametrize(
    "op", [addition, log1pexp, lambda x: two_outputs(x)[0]], ids=["plain", "by e", "two"]
)
def test_counts_are_linear_in_a_chain(op):
    def chain(length):
        def run(x):
            for _ in range(length):
                x = op(x)
            return x

        calls_of(run, x)
        return calls_of(run, x)

    x = [array(0.5, 1.0)]
    one = chain(1)
    assert min(one) > 0
    for length in (10, 50):
        assert chain(length) == tuple(length * n for n in one)


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


def test_functions_of_the_package_are_counted():
    """The functions of the package, and the functions that they call."""
    assert calls(lambda: keras.ops.exp(array(1.0)))[0] == 0
    forward, _ = calls(lambda: multigrad.core.call.is_plain(lambda u: u))
    assert forward == 1


# ------------------------------------------------------------------ tests of the checks


def planted(function):
    """Return the function after a wrapper that calls it and that counts as a function of the package."""
    scope = {"function": function}
    code = compile("def call(*args):\n    return function(*args)", PACKAGE + "planted.py", "exec")
    exec(code, scope)
    return scope["call"]


def planted_deeper(function):
    """The same, with one more call in each call."""
    chain = [function]

    def call(*args):
        chain.append(planted(chain[-1]))
        return chain[-1](*args)

    return call


@pytest.mark.parametrize(("place", "what"), [("is_plain", "forward"), ("read", "backward")])
def test_one_more_call_exceeds_the_bound(place, what, monkeypatch):
    before = counted(log1pexp, PAIRS["log1pexp"].arguments())
    function = getattr(multigrad.core.call, place)
    monkeypatch.setattr(multigrad.core.call, place, planted(function))
    after = counted(log1pexp, PAIRS["log1pexp"].arguments())
    more = {what: getattr(after, what) - getattr(before, what) for what in Counts._fields}
    assert more == dict.fromkeys(Counts._fields, 0) | {what: 1}


@pytest.mark.parametrize(
    "test",
    [
        lambda: test_counts_do_not_grow_with_calls("log1pexp"),
        lambda: test_counts_do_not_grow_with_earlier_ops(),
        lambda: test_counts_are_linear_in_a_chain(log1pexp),
    ],
)
def test_growing_counts_are_found(test, monkeypatch):
    function = multigrad.core.call.is_plain
    monkeypatch.setattr(multigrad.core.call, "is_plain", planted_deeper(function))
    with pytest.raises(AssertionError):
        test()


def test_one_more_operation_or_residual_exceeds_the_bound():
    @op_custom_gradient
    def wasteful(x):
        e, other = ops.exp(x), ops.sin(x)

        def rule(u):
            return u * 7.0 * (1.0 - 1.0 / (1.0 + e)) + 0.0 * other

        return ops.log(1.0 + e), rule

    with pytest.raises(AssertionError, match="log1pexp: Counts"):
        require_within_bounds("log1pexp", wasteful)


def test_growing_counts_are_not_linear():
    with pytest.raises(AssertionError):
        require_linear([(n * n, n) for n in range(4)])
    with pytest.raises(AssertionError):
        require_linear([(0, n) for n in range(4)])
