"""Gradients of functions, and their compiled programs."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from multigrad.backend.jax.private import DynamicJaxprTracer
from multigrad.backend.jax.tensors import conjugate


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
) -> tuple[tuple[Any, Any], list[Any]]:
    if not tensors:  # jax.value_and_grad requires an argument
        return function(), []
    argnums = tuple(range(len(tensors)))
    answer, gradients = jax.value_and_grad(function, argnums, has_aux=True)(*tensors)
    return answer, conjugate(gradients)


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    outputs, pull, aux = jax.vjp(function, *tensors, has_aux=True)
    return (outputs, aux), lambda upstream: conjugate(pull(conjugate(upstream)))


def jacobian(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[Any, list[list[Any]]]:
    (outputs, aux), pull = vjp(function, tensors)
    zeros = [jnp.zeros_like(output) for output in outputs]
    rows = []
    for index, output in enumerate(outputs):

        def row(upstream: Any, index: int = index) -> Sequence[Any]:
            return pull([*zeros[:index], upstream, *zeros[index + 1 :]])

        basis = jnp.eye(output.size, dtype=output.dtype).reshape(output.size, *output.shape)
        gradients = jax.vmap(row)(basis)
        rows.append([g.reshape(output.shape + t.shape) for g, t in zip(gradients, tensors, strict=True)])
    return aux, rows


def may_record() -> bool:
    return True


def needs_plain_rule() -> bool:
    return False


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    # If one tensor is being differentiated, tensors of an outer jit are constants of this derivative.
    traced = [isinstance(tensor, jax.core.Tracer) for tensor in tensors]
    inner = [t and not isinstance(x, DynamicJaxprTracer) for x, t in zip(tensors, traced, strict=True)]
    return inner if any(inner) else traced


@functools.lru_cache(256)
def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, True, *static))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return jax.disable_jit()
