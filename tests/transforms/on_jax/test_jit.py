"""`jax.jit`: inside and outside of derivatives, ahead of time, and with donated buffers."""

import jax
import jax.numpy as jnp
import pytest
from orders import EACH, WS, XS, W, X, first, orders, same
from support import close

from multigrad import op_custom_gradient


@EACH
def test_jit_around_derivatives(case):
    same(case.op, case.meant)


@EACH
def test_jit_in_derivatives(case):
    close(orders(jax.jit(jax.jit(case.op)))(X, W), orders(case.meant)(X, W), 1e-4)


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


@EACH
@pytest.mark.parametrize("done", DONE.values(), ids=DONE)
def test_transforms_of_jitted_derivatives(case, done):
    """The rule still applies in the program of a derivative."""
    got, wanted = done(jax.jit(first(case.op))), done(first(case.meant))
    close(got(X, W), wanted(X, W), 1e-3)
    close(jax.jit(got)(X, W), wanted(X, W), 1e-3)


@EACH
def test_eval_shape(case):
    vector = jax.ShapeDtypeStruct((3,), "float32")
    assert jax.eval_shape(orders(case.op), vector, vector) == (vector, (vector,) * 2, (vector,) * 2)


@EACH
def test_ahead_of_time(case):
    vector = jax.ShapeDtypeStruct((3,), "float32")
    compiled = jax.jit(orders(case.op)).lower(vector, vector).compile()
    close(compiled(X, W), orders(case.meant)(X, W), 1e-4)


@EACH
def test_donated_buffers(case):
    def trained(function):
        def step(x, w):
            of_x, of_w = first(function)(x, w)
            return x - of_x, w - of_w

        return step

    donated = jnp.array(X), jnp.array(W)
    moved = jax.jit(trained(case.op), donate_argnums=(0, 1))(*donated)
    assert [array.is_deleted() for array in donated] == [True, True]
    close(moved, trained(case.meant)(X, W), 1e-4)


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
}


@EACH
@pytest.mark.parametrize("transform", LEAKS.values(), ids=LEAKS)
def test_no_tracer_leaks(case, transform):
    with jax.checking_leaks():
        got = transform(case.op)(X, W)
    close(got, transform(case.meant)(X, W), 1e-4)
