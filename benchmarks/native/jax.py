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


def bind_both_modes(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an elementwise op for forward mode, of the functions that `bind` takes."""

    @jax.custom_jvp
    def native(x: Any) -> Any:
        return forward(x)[0]

    @native.defjvp
    def push(primals: Any, tangents: Any) -> Any:
        output, residuals = forward(*primals)
        return output, backward(residuals, *tangents)

    return native


bind_mapped = bind


def for_weights(model: Any, loss: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of `x` with the value of `loss(call, grad, x)` and its gradients by the weights."""

    def function(weights: Any, x: Any) -> Any:
        return loss(lambda x: model.stateless_call(weights, [], x)[0], jax.grad, x)

    gradients = jax.value_and_grad(function)
    return lambda x: gradients([weight.value for weight in model.trainable_variables], x)


grad, jacobian, hessian, compiled_function = jax.grad, jax.jacobian, jax.hessian, jax.jit


def vmap_grad(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return jax.vmap(jax.grad(f))


def jvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(f, (x,), (tangent,))


def hvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    gradient = jax.grad(f)
    return lambda x: jax.jvp(gradient, (x,), (tangent,))[1]
