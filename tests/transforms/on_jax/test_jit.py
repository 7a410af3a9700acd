"""`jax.jit`: inside and outside of derivatives, with donated buffers, and without leaks of tracers."""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import W, X, as_meant
from keras import ops
from orders import WS, XS, first, orders
from support import close

from multigrad import grad, op_custom_gradient
from multigrad.ops import linear_cross_entropy

DONE = {
    "first": first,
    "second": lambda written: first(first(written)),
    "by one argument": lambda written: lambda x, w: first(lambda w, _: written(x, w))(w, x),
    "linearized": lambda written: lambda x, w: jax.linearize(first(written), x, w)[0],
    "checkpoint": lambda written: first(jax.checkpoint(written)),
    "mapped": lambda written: lambda x, w: jax.vmap(written)(XS * x, WS * w),
    "mapped over one": lambda written: lambda x, w: jax.vmap(written, (0, None))(XS * x, w),
    "first, mapped": lambda written: lambda x, w: jax.vmap(first(written), (None, 0), 1)(x, WS * w),
    "mapped, first": lambda written: first(lambda x, w: jax.vmap(written, (None, 0))(x, WS * w)),
    "loop, first": lambda written: first(
        lambda x, w: jax.lax.scan(lambda x, w: (written(x, w)[0], x), x * 0.1, WS * w)
    ),
    "branch, first": lambda written: first(
        lambda x, w: jax.lax.cond(x[0] > 0.0, written, lambda *both: both, x, w)
    ),
}


@pytest.mark.parametrize("done", DONE.values(), ids=DONE)
@as_meant(tolerance=1e-3)
def test_transforms_of_jitted_derivatives(f, done):
    """The rule still applies in the program of a derivative."""
    got = done(jax.jit(first(f)))
    return got(X, W), jax.jit(got)(X, W)


def test_a_donated_buffer_that_the_rule_uses():
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * x * 7.0))

    def train(x):
        value, gradient = jax.value_and_grad(lambda x: op(x).sum())(x)
        return x - gradient, value

    donated = jnp.array(X)
    moved, value = jax.jit(train, donate_argnums=0)(donated)
    assert donated.is_deleted()
    close((moved, value), (-6.0 * X, 2.0 * X.sum()))


def test_the_function_and_its_rule_are_traced_once():
    traced = []

    @op_custom_gradient
    def op(x):
        traced.append("function")
        return x * 2.0, lambda u: traced.append("rule") or u * 7.0

    gradient = jax.jit(jax.grad(lambda x: op(x).sum()))
    for _ in range(3):
        close(gradient(X), jnp.full(3, 7.0))
    assert traced == ["function", "rule"]


LEAKS = {
    "jit": lambda function: jax.jit(function),
    "jit of grad": lambda function: jax.jit(first(function)),
    "grad of jit": lambda function: first(jax.jit(function)),
    "vmap": lambda function: lambda x, w: jax.vmap(first(function))(x[None], w[None]),
    "checkpoint": lambda function: first(jax.checkpoint(function)),
    "scan": lambda function: first(
        lambda x, w: jax.lax.scan(lambda x, _: (function(x, w), None), x, None, length=1)[0]
    ),
    "every order": lambda function: jax.jit(orders(function)),
    "every order of jit": lambda function: orders(jax.jit(jax.jit(function))),
}


@pytest.mark.parametrize("transform", LEAKS.values(), ids=LEAKS)
@as_meant
def test_no_tracer_leaks(f, transform):
    with jax.checking_leaks():
        return transform(f)(X, W)


def test_the_gradient_of_a_frozen_kernel_is_not_computed():
    y = ops.zeros((64,), "int32")

    def loss(x, w):
        return linear_cross_entropy(x, w, y, block_size=32, reduction="mean")

    def products(function):
        """Count in the optimized program, without unused results of loops."""
        program = jax.jit(function).lower(ops.ones((64, 2)), ops.ones((2, 40))).compile().as_text()
        return len(re.findall(r"= \S+ dot\(|custom_call_target=.*matmul", program))

    assert [products(grad(loss, argnums)) for argnums in (0, (0, 1))] == [2, 3]
