"""A function that calls the rule of a run with its residuals, and whether these are intermediate results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from multigrad.backend.base import Call, Run
from multigrad.backend.jax.private import WithoutTangent, without_constants
from multigrad.backend.jax.tensors import (
    FLOATING,
    any_traced,
    is_differentiable,
    scatter,
    specs_of,
    varying_alike,
)
from multigrad.core.closure import classify, lift, restore
from multigrad.core.reachable import reachable_tensors
from multigrad.core.type_sets import TypeSet

Pull = Callable[..., Sequence[Any]]
"""Maps the residuals of a rule, the upstream gradients, and which gradients are needed, to the gradients.
`transposed=True` says that this is for forward mode."""


def pull_of(run: Run, may_use_tracers: bool) -> Pull:
    """Return a function that calls the rule of a run whose residuals have been lifted.

    Arguments:
        run: the run.
        may_use_tracers: whether the rule may use a traced array of an object. The rule is then traced,
            because the array cannot be used later. Its arrays become the residuals of the run.
    """
    if may_use_tracers or (run.is_opaque and any_traced(run.pullback.values_in_scopes())):
        try:
            return _trace(run)
        except _NEEDS_VALUES:
            if may_use_tracers:
                raise
    pullback, template, specs = run.pullback, run.template, specs_of(run.inputs)

    def pull(
        residuals: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool], transposed: bool = False
    ) -> Sequence[Any]:
        # Forward mode runs the rule only to transpose it.
        called = pullback.without_trace if transposed else pullback
        return called.pull(restore(template, residuals), upstream, needed, specs)

    return pull


# The errors that JAX raises when a rule needs the value of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _trace(run: Run) -> Pull:
    """Trace an opaque rule, and return a function that evaluates its jaxpr with the arrays that it uses.

    These become the residuals of the run.
    """
    rule, inputs, outputs, pullback = run.rule, run.inputs, run.outputs, run.pullback
    specs = specs_of(inputs)
    nonzero: list[int] = []

    def traced_rule(*upstream: Any) -> list[Any]:
        gradients = pullback.pull(rule, scatter(upstream, floating), [True] * len(inputs), specs)
        nonzero[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in nonzero]

    floating = [is_differentiable(output) for output in outputs]
    floating_outputs = [output for output, f in zip(outputs, floating, strict=True) if f]
    like: list[Any] = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in floating_outputs]
    if jax.sharding.get_abstract_mesh().manual_axes:
        # Arrays, because a ShapeDtypeStruct does not have the axes along which an array varies.
        like = varying_alike([*floating_outputs, *inputs])[: len(floating_outputs)]
    traced = jax.make_jaxpr(traced_rule)(*like)
    jaxpr = without_constants(traced)
    run.residuals, run.is_opaque = list(traced.consts), False
    run.roles = classify(run.residuals, inputs, outputs)

    # It must not hold the residuals, which may be tracers.
    def pull(
        residuals: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool], transposed: bool = False
    ) -> list[Any]:
        floating_upstream = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr, residuals, *floating_upstream)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(nonzero, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return pull


_HOST_ARRAYS = TypeSet(np.ndarray, np.generic)
_ARRAYS = TypeSet(jax.Array, jax.core.Tracer, np.ndarray, np.generic)


def constants_of(call: Call) -> list[Any]:
    """Return the arrays that a function can reach before it runs. Later, it may have stored further ones."""
    return [array for root in (call.f, *call.objects()) for array in reachable_tensors(root, _ARRAYS)]


def uses_intermediate(run: Run, constants: Sequence[Any]) -> bool:
    """Return whether the rule uses an array that may depend on the inputs, other than inputs and outputs.

    The derivative of such an array goes through the function.

    Arguments:
        run: a run.
        constants: the arrays that the function could use before it ran.
    """
    if run.is_opaque:
        return True
    known, others = set(map(id, constants)), [x for x in run.others() if FLOATING[x.dtype]]
    # Operations on tracers return tracers. Operations on a `WithoutTangent` return concrete arrays.
    are_concrete = any([isinstance(x, WithoutTangent) for x in run.inputs])
    if not are_concrete:
        others = [array for array in others if isinstance(array, jax.core.Tracer)]
    if any([id(array) not in known for array in others]):
        return True
    # With concrete arrays, the function may also have computed a NumPy array.
    on_host = lift(run.rule, _HOST_ARRAYS)[0] if are_concrete else ()
    return any([id(x) not in known and (x.dtype == object or FLOATING[x.dtype]) for x in on_host])
