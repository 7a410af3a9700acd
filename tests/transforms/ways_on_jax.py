"""The ways of JAX to compute a gradient, without forward mode, see `ways.py`."""

import jax
import jax.numpy as jnp


def every(tensors):
    return tuple(range(len(tensors)))


def by_grad(loss):
    return lambda *xs: jax.grad(loss, every(xs))(*xs)


def by_vjp(loss):
    def gradients(*xs):
        value, pull = jax.vjp(loss, *xs)
        return pull(jnp.ones_like(value))

    return gradients


def by_vmap(loss):
    def gradients(*xs):
        both = jax.vmap(by_grad(loss))(*[jnp.stack([x, 0.5 * x]) for x in xs])
        return [both_of_one[0] for both_of_one in both]

    return gradients


def by_scan(loss):
    def scanned(*xs):
        return jax.lax.scan(
            lambda total, _: (total + loss(*xs), None), jnp.zeros_like(loss(*xs)), jnp.ones(1)
        )[0]

    return by_grad(scanned)


def by_cond(loss):
    def chosen(*xs):
        return jax.lax.cond(jnp.sum(xs[0]) < 1e9, loss, lambda *xs: 0.0 * loss(*xs), *xs)

    return by_grad(chosen)


WAYS = {
    "jax.grad": by_grad,
    "jax.jit of a gradient": lambda loss: jax.jit(by_grad(loss)),
    "jax.grad of a program": lambda loss: by_grad(jax.jit(loss)),
    "jax.vjp": by_vjp,
    "jax.jacrev": lambda loss: lambda *xs: jax.jacrev(loss, every(xs))(*xs),
    "jax.vmap": by_vmap,
    "jax.checkpoint": lambda loss: by_grad(jax.checkpoint(loss)),
    "jax.lax.scan": by_scan,
    "jax.lax.cond": by_cond,
}
LACKING = set()

EAGER = ["jax.grad", "jax.vjp"]
"""The ways in which a function sees concrete values."""
LACKING_OF_KERAS = set()
LACKING_OF_HOST_CALLS = set()
LACKING_OF_ONE_ARRAY = set()
