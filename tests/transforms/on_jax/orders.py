"""A function of two arrays, and its first and second derivatives."""

import jax
import jax.numpy as jnp
from cases import W, X, each_of

XS, WS = jnp.stack([X, X * 0.5, 0.25 - X, -X]), jnp.stack([W, W + 1.0, -W, W * W])

WITHOUT_WEIGHTS = each_of(forms=["method"])
"""For an op around the case, whose rule has no gradient for a weight."""


def weighted(tree):
    """Return a weighted sum of all numbers."""
    weights = [jnp.cos(jnp.arange(leaf.size, dtype="float32")) for leaf in jax.tree.leaves(tree)]
    return sum((w * leaf.ravel()).sum() for w, leaf in zip(weights, jax.tree.leaves(tree), strict=True))


def first(function):
    """Return a function of the gradients of a weighted sum."""
    return jax.grad(lambda x, w: weighted(function(x, w)), (0, 1))


def orders(function):
    return lambda x, w: (function(x, w), first(function)(x, w), first(first(function))(x, w))


def compiled_orders(function, x=X, w=W):
    """Return the value and both derivatives, in one program."""
    return jax.jit(orders(function))(x, w)
