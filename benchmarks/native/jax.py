"""JAX: a `jax.custom_vjp`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The native op of `forward(*tensors) -> outputs, residuals` and `backward(residuals, *upstream)`."""

    @jax.custom_vjp
    def native(*tensors: Any) -> Any:
        return forward(*tensors)[0]

    def pull(residuals: Any, upstream: Any) -> Any:
        gradients = backward(residuals, *(upstream if isinstance(upstream, tuple) else (upstream,)))
        return gradients if isinstance(gradients, tuple) else (gradients,)

    native.defvjp(forward, pull)
    return native


ANEW = True
"""Whether an op by hand is defined anew in a layer's call."""


def tensor(array: Any) -> jax.Array:
    return jnp.asarray(array)


def constant(array: Any) -> jax.Array:
    """An array that nobody differentiates by."""
    return jnp.asarray(array)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """A run of `f(*args)`, forward and backward."""
    ones = jax.tree.map(jnp.ones_like, f(*args))

    def run() -> Any:
        _, pull = jax.vjp(f, *args)
        return pull(ones)

    return run


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """The same, compiled."""
    whole = jax.jit(_both(f))

    def run() -> Any:
        return whole(args)

    return run


def _both(f: Callable[..., Any]) -> Callable[[Any], Any]:
    def both(args: Any) -> Any:
        outputs, pull = jax.vjp(f, *args)
        return pull(jax.tree.map(jnp.ones_like, outputs))

    return both


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Make the program of a run anew."""
    jax.jit(_both(f)).lower(args)


def wait(result: Any) -> None:
    """Until the numbers are there."""
    jax.block_until_ready(result)


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a forward pass leaves for the backward pass, and keeps alive."""
    return jax.block_until_ready(jax.vjp(f, *args))


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """The derivative of this order of an elementwise function, forward pass and all."""
    g = f
    for _ in range(order):
        g = jax.grad(lambda x, g=g: jnp.sum(g(x)))
    return g
