"""`jax.lax.scan`, `fori_loop` and `while_loop`, against a Python loop."""

import jax
import jax.numpy as jnp
import pytest
from orders import EACH, WS, XS, W, X, first, same
from support import close

from multigrad import op_custom_gradient


def unrolled(function, x, ws):
    """Return the result of three iterations."""
    results = []
    for w in ws:
        x = 0.1 * function(x, w)
        results.append(x)
    return x, jnp.stack(results)


@EACH
def test_scan(case):
    def scanned(x, ws):
        def body(carry, w):
            y = 0.1 * case.op(carry, w)
            return y, y

        return jax.lax.scan(body, x, ws, reverse=True)

    def meant(x, ws):
        last, results = unrolled(case.meant, x, ws[::-1])
        return last, results[::-1]

    same(scanned, meant, X, WS[:3])


@EACH
def test_scan_with_closed_over_tensors(case):
    def scanned(x, w):
        return jax.lax.scan(lambda carry, _: (0.1 * case.op(carry, w), None), x, None, 3)[0]

    same(scanned, lambda x, w: unrolled(case.meant, x, [w] * 3)[0])


@EACH
def test_fori_loop(case):
    """A `fori_loop` is differentiable if its number of iterations is static."""

    def looped(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, x: 0.1 * case.op(x, w), x)

    same(looped, lambda x, w: unrolled(case.meant, x, [w] * 3)[0])


@EACH
def test_while_loop(case):
    def looped(x, w):
        def body(state):
            rounds, x = state
            return rounds + 1, 0.1 * case.op(x, w)

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    close(looped(X, W), unrolled(case.meant, X, [W] * 3)[0])
    many = jnp.stack([unrolled(case.meant, x, [w] * 3)[0] for x, w in zip(XS, WS, strict=True)])
    close(jax.jit(jax.vmap(looped))(XS, WS), many)
    # JAX has no reverse mode for a loop of unknown length, with or without an op in it.
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.while_loop"):
        first(looped)(X, W)


@EACH
def test_gradients_in_a_while_loop(case):
    """Gradient descent until convergence, with gradients by the rule."""

    def step(function, x, w):
        return x - 0.01 * first(function)(x, w)[0]

    def descend(state):
        rounds, x, w = state
        return rounds + 1, step(case.op, x, w), w

    got = jax.lax.while_loop(lambda state: state[0] < 3, descend, (0, X, W))[1]
    wanted = X
    for _ in range(3):
        wanted = step(case.meant, wanted, W)
    close(got, wanted)


@EACH
def test_map(case):
    same(
        lambda xs, ws: jax.lax.map(lambda both: case.op(*both), (xs, ws)),
        lambda xs, ws: jnp.stack([case.meant(x, w) for x, w in zip(xs, ws, strict=True)]),
        XS,
        WS,
    )


def test_a_second_derivative_of_a_mapped_op_in_a_loop():
    """Before 0.12, JAX drops the rule of a `jax.custom_jvp` there."""
    op = op_custom_gradient(lambda x: (jnp.exp(x), lambda u: u * 7.0 * jnp.exp(x)))

    def looped(x):
        return jax.lax.scan(lambda x, _: (jax.vmap(op)(0.5 * x), None), x, None, 2)[0]

    def pulled(x):
        return jax.vjp(looped, x)[1](jnp.ones_like(x))[0]

    written = jax.make_jaxpr(pulled)(X)

    def again(x):
        return jax.core.eval_jaxpr(written.jaxpr, written.consts, x)[0].sum()

    y = jnp.exp(0.5 * X)
    first, second = 3.5 * y, 3.5 * jnp.exp(0.5 * y)  # the rule's derivatives of both iterations
    close(jax.grad(again)(X), 0.5 * second * first * (first + 1.0))
