"""Closed-over tracers of an outer jit, grad, vmap or loop.

The output has no gradient with respect to the tracer, because the function stops it. What the rule computes
from the tracer has a gradient, in a second derivative.
"""

import jax
import jax.numpy as jnp
from orders import WITHOUT_WEIGHTS, WS, XS, W, X, first
from support import close

from multigrad import op_custom_gradient


def closing_over(w, case):
    @op_custom_gradient
    def op(x):
        y = case.op(x, jax.lax.stop_gradient(w))
        return y, lambda u: u * 7.0 * jnp.cos(x) * w

    return op


def gradients(case):
    return first(lambda x, w: closing_over(w, case)(x))


def meant_gradients(x, w):
    upstream = first(lambda y, _: y)(x, w)[0]
    return upstream * 7.0 * jnp.cos(x) * w, jnp.zeros_like(w)


@WITHOUT_WEIGHTS
def test_tracers_of_grad_and_jit(case):
    got = gradients(case)
    close(got(X, W), meant_gradients(X, W))
    close(jax.jit(got)(X, W), meant_gradients(X, W))
    close(jax.jit(first(got))(X, W), first(meant_gradients)(X, W))
    within = jax.jit(lambda x, w: first(jax.jit(lambda x, _: closing_over(w, case)(x)))(x, w)[0])
    close(within(X, W), meant_gradients(X, W)[0])


@WITHOUT_WEIGHTS
def test_tracers_of_vmap(case):
    wanted = jax.tree.map(
        lambda *parts: jnp.stack(parts), *[meant_gradients(x, w) for x, w in zip(XS, WS, strict=True)]
    )
    close(jax.vmap(gradients(case))(XS, WS), wanted)
    close(jax.jit(jax.vmap(gradients(case)))(XS, WS), wanted)
    # The op maps over x, and closes over a tensor that the outer vmap maps.
    inner = jax.vmap(lambda w: jax.vmap(lambda x: closing_over(w, case)(x))(XS))(WS)
    close(inner, jnp.stack([jnp.stack([case.meant(x, w) for x in XS]) for w in WS]), 1e-4)


@WITHOUT_WEIGHTS
def test_tracers_of_a_loop(case):
    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(closing_over(w, case)(x)), None), x, ws)[0]

    def unrolled(x, ws):
        for w in ws:
            x = jnp.sin(closing_over(w, case)(x))
        return x

    close(jax.jit(first(scanned))(X, WS[:3]), first(unrolled)(X, WS[:3]), 1e-4)


@WITHOUT_WEIGHTS
def test_tracers_of_checkpoint(case):
    def function(x, w):
        return jax.checkpoint(lambda x, w: closing_over(w, case)(x))(x, w)

    close(first(function)(X, W), meant_gradients(X, W))
