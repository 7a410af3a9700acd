"""Gradients of functions, and their compiled programs."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from multigrad.backend.base import Operation
from multigrad.backend.jax import private
from multigrad.backend.jax.tensors import conjugate


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: Sequence[Any]
) -> tuple[tuple[Any, Any], list[Any]]:
    if not tensors:  # jax.value_and_grad requires an argument
        return function(), []
    argnums = tuple(range(len(tensors)))
    answer, gradients = jax.value_and_grad(function, argnums, has_aux=True)(*tensors)
    return answer, conjugate(gradients)


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any], variables: Sequence[Any] = ()
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    outputs, pullback, aux = jax.vjp(function, *tensors, has_aux=True)
    # A rule that closes over the result closes over its arrays directly.
    arrays, structure = jax.tree_util.tree_flatten(pullback)

    def transpose(upstream: Sequence[Any]) -> Sequence[Any]:
        return conjugate(jax.tree_util.tree_unflatten(structure, arrays)(conjugate(upstream)))

    return (outputs, aux), transpose


def jvp(
    function: Callable[..., tuple[Sequence[Any], Any]],
    tensors: Sequence[Any],
    tangents: Sequence[Any],
    variables: Sequence[Any] = (),
) -> tuple[tuple[Sequence[Any], Any], Sequence[Any]]:
    outputs, pushed, aux = jax.jvp(function, tuple(tensors), tuple(tangents), has_aux=True)
    return (outputs, aux), pushed


def vmap(
    function: Callable[..., tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    results: tuple[Sequence[Any], Sequence[Any]] = jax.vmap(function, out_axes=(0, None))(*tensors)
    return results


def depends_on_element(result: Any, elements: Sequence[Any]) -> bool:
    return private.trace_of(result) is private.trace_of(elements[0])


def may_record(tensors: Sequence[Any] | None = None) -> bool:
    return tensors is None or any([isinstance(tensor, jax.core.Tracer) for tensor in tensors])


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function)


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    return jax.disable_jit()


def operations(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> set[Operation] | None:
    try:
        jaxpr = jax.make_jaxpr(functools.partial(function))(*tensors)  # a new object, which is not cached
    except Exception:  # noqa: BLE001 - a function may reject tracers with any exception
        return None
    return set(_operations_of(jaxpr.jaxpr))


def _operations_of(jaxpr: Any) -> Iterator[Operation]:
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda leaf: _jaxpr_in(leaf) is not None)
        nested = [inner for inner in map(_jaxpr_in, leaves) if inner is not None]
        for inner in nested:
            yield from _operations_of(inner)
        if not nested:  # operands and results of a program need not depend on each other
            operands, results = [
                tuple(str(getattr(variable.aval, "dtype", "")) for variable in variables)
                for variables in (equation.invars, equation.outvars)
            ]
            yield operands, results


def _jaxpr_in(parameter: Any) -> Any:
    """Return the jaxpr that a parameter of an equation is, or that it closes over constants of."""
    jaxpr = getattr(parameter, "jaxpr", parameter)
    return jaxpr if hasattr(jaxpr, "eqns") else None
