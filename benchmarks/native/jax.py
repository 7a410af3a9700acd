"""JAX: `jax.custom_vjp`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

VERSION = f"JAX {jax.__version__}"


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op.

    `forward(*tensors)` returns outputs and residuals. `backward(residuals, *upstream)` returns gradients.
    """

    @jax.custom_vjp
    def native(*tensors: Any) -> Any:
        return forward(*tensors)[0]

    def pullback(residuals: Any, upstream: Any) -> Any:
        gradients = backward(residuals, *(upstream if isinstance(upstream, tuple) else (upstream,)))
        return gradients if isinstance(gradients, tuple) else (gradients,)

    native.defvjp(forward, pullback)
    return native


DEFINES_IN_EACH_CALL = True
"""Whether JAX code usually defines an op in a layer's call."""


def tensor(array: Any) -> jax.Array:
    return jnp.asarray(array)


def constant(array: Any) -> jax.Array:
    """Return an array that is a constant in derivatives."""
    return jnp.asarray(array)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward."""
    ones = jax.tree.map(jnp.ones_like, f(*args))

    def run() -> Any:
        _, pullback = jax.vjp(f, *args)
        return pullback(ones)

    return run


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward, compiled by `jax.jit`."""
    both = jax.jit(_forward_and_backward(f))

    def run() -> Any:
        return both(args)

    return run


def _forward_and_backward(f: Callable[..., Any]) -> Callable[[Any], Any]:
    def both(args: Any) -> Any:
        outputs, pullback = jax.vjp(f, *args)
        return pullback(jax.tree.map(jnp.ones_like, outputs))

    return both


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Trace the forward and backward pass again."""
    jax.jit(_forward_and_backward(f)).lower(args)


def wait(result: Any) -> None:
    """Wait until a result is computed."""
    jax.block_until_ready(result)


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run the forward pass, and return what keeps its residuals alive."""
    return jax.block_until_ready(jax.vjp(f, *args))


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """Return the derivative of an elementwise function, of this order, including its forward pass."""
    g = f
    for _ in range(order):
        g = jax.grad(lambda x, g=g: jnp.sum(g(x)))
    return g


def accelerator() -> str | None:
    """Return the name of the accelerator, None without one."""
    return None if jax.default_backend() == "cpu" else jax.devices()[0].device_kind


def allocated() -> int | None:
    """Return the bytes of the arrays on the accelerator, None without one."""
    return None if jax.default_backend() == "cpu" else jax.devices()[0].memory_stats()["bytes_in_use"]
