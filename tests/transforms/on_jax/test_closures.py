"""Closed-over tracers of an outer jit, vmap, loop or checkpoint, and tracers that a function stores.

`tests/test_closed_over.py` has the tests that are equal on every backend.
"""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, W, X
from keras import ops
from orders import WS, XS, first
from support import close

from multigrad import op_custom_gradient


def closing_over(w):
    """Return an op without a gradient with respect to `w`, except by what the rule computes from it."""

    @op_custom_gradient
    def op(x):
        y = CASES["intermediate"].op(x, jax.lax.stop_gradient(w))
        return y, lambda u: u * 7.0 * jnp.cos(x) * w

    return op


def closed_over(x, w):
    return closing_over(w)(x)


def meant_gradients(x, w):
    upstream = first(lambda y, _: y)(x, w)[0]
    return upstream * 7.0 * jnp.cos(x) * w, jnp.zeros_like(w)


WITHIN = {
    "nothing": closed_over,
    "jit": jax.jit(closed_over),
    "checkpoint": jax.checkpoint(closed_over),
    "a closed-over tracer in jit": lambda x, w: jax.jit(lambda x: closed_over(x, w))(x),
}


@pytest.mark.parametrize("function", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients(function, wrap):
    close(wrap(first(function))(X, W), meant_gradients(X, W))
    close(wrap(first(first(function)))(X, W), first(meant_gradients)(X, W))
    close(wrap(jax.vmap(first(function)))(XS, WS), jax.vmap(meant_gradients)(XS, WS))


def test_an_op_that_is_mapped_and_closes_over_a_tensor_that_is_mapped_outside():
    inner = jax.vmap(lambda w: jax.vmap(closing_over(w))(XS))(WS)
    meant = CASES["intermediate"].meant
    close(inner, jax.vmap(lambda w: jax.vmap(lambda x: meant(x, w))(XS))(WS), 1e-4)


# ------------------------------------------------------------------------------- tracers that are stored


PAIR = jnp.asarray([1.0, 2.0])


def appends_to_a_list(x):
    seen = [x]

    @op_custom_gradient
    def op(x):
        seen.append(x**2)
        return x**3, lambda u: u * 7.0 * x

    op(x)
    return (seen[-1] * len(seen)).sum()


def writes_to_a_dict(x):
    state, both = {"mean": ops.stop_gradient(x) * 0.0}, []

    @op_custom_gradient
    def op(x):
        state["mean"] = state["mean"] * 0.5 + x
        return state["mean"] * 1.0, lambda u: u * 7.0

    both += [op(x), op(x)]
    return (state["mean"] + sum(both)).sum()


def uses_attributes_of_a_function(x):
    def scaled(y):
        return y * scaled.factor

    scaled.factor, scaled.calls = ops.stop_gradient(x)[1], 0

    @op_custom_gradient
    def op(x):
        scaled.calls += 1
        return scaled(x), lambda u: u * 7.0 * scaled.factor

    return op(op(x)).sum() * scaled.calls


STORED = [
    (appends_to_a_list, 10.0),
    (writes_to_a_dict, 3.0 * (1.5 + 1.0 + 1.5)),
    (uses_attributes_of_a_function, 24.0),
]
WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "grad": lambda f: lambda x: jax.value_and_grad(f)(x)[0],
    "jit of grad": lambda f: jax.jit(lambda x: jax.value_and_grad(f)(x)[0]),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize(("function", "wanted"), STORED)
def test_tracers_that_a_function_stores(function, wanted, wrap):
    close(wrap(function)(PAIR), jnp.float32(wanted))


def test_a_traced_attribute_that_only_the_rule_uses():
    class Scaled:
        @op_custom_gradient
        def op(self, x):
            return x * 1.0, lambda u: u * 7.0 * self.factor

    scaled = Scaled()

    def loss(x, factor):
        scaled.factor = factor
        return scaled.op(x)

    for wrap in (lambda f: f, jax.jit):
        close(wrap(jax.grad(loss))(3.0, 2.0), 14.0)
        close(wrap(jax.grad(lambda factor: jax.grad(loss)(3.0, factor)))(2.0), 7.0)
    with pytest.raises(TypeError, match=r"Scaled\.op: the rule reaches a tensor through an object"):
        jax.grad(loss, (0, 1))(3.0, 2.0)


def test_the_rule_applies_if_a_function_appends_tracers_to_a_list():
    def loss(w, x):
        params = [w]

        @op_custom_gradient
        def op(x):
            params.append(x)
            return x * ops.stop_gradient(params[0]), lambda u: u * 7.0 * params[0] * x

        return op(x).sum()

    for wrap in (lambda f: f, jax.jit, jax.vmap):
        close(wrap(jax.grad(loss, 1))(3 * PAIR, PAIR), 21 * PAIR**2)


def test_a_rule_that_writes_to_a_list_of_tracers():
    @jax.jit
    def appended(x):
        seen = [x]
        op = op_custom_gradient(lambda x: (x**3, lambda u: (seen.append(None), u * 7.0)[1]))
        return jax.grad(lambda x: op(x).sum())(x), len(seen)

    close(appended(PAIR), (7.0 * jnp.ones(2), 2))


def test_tracers_of_an_earlier_trace_in_a_dict():
    """The function overwrites them without reading them."""
    cache = {}

    @op_custom_gradient
    def op(x):
        cache["e"] = x**2
        return cache["e"] * x, lambda u: u * 21.0 * x**2

    def total(x):
        return op(x).sum()

    for _ in range(2):
        close(jax.jit(jax.grad(total))(PAIR), 21 * PAIR**2)
        close(op(PAIR), PAIR**3)
        assert isinstance(cache["e"], jax.Array)
        close(cache["e"], PAIR**2)
        close(jax.grad(total)(PAIR), 21 * PAIR**2)
        close(jax.jit(total)(PAIR[:1]), jnp.float32(1.0))
