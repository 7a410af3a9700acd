"""The residuals of a run: the arrays that its rule uses, and a function that calls the rule with them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from multigrad.backend.base import Call, Run, Spec
from multigrad.backend.jax.private import WithoutTangent, without_constants
from multigrad.backend.jax.tensors import (
    FLOATING,
    any_traced,
    is_differentiable,
    scatter,
    specs_of,
    varying_alike,
)
from multigrad.core.closure import OTHER, classify, lift, restore
from multigrad.core.reachable import reachable_tensors
from multigrad.core.type_sets import TypeSet

Pull = Callable[..., Sequence[Any]]
"""Maps the arrays of a rule, the upstream gradients, and which gradients are needed, to the gradients.
`transposed=True` says that this is for forward mode."""


class Residuals:
    """The arrays that a rule uses.

    Arguments:
        arrays: the arrays.
        roles: for each array an index among the inputs followed by the outputs, or `OTHER`.
        pull: calls the rule with these arrays.
        is_opaque: whether the rule also uses an object that may hold arrays.
    """

    __slots__ = ("arrays", "is_opaque", "pull", "roles")

    def __init__(self, arrays: list[Any], roles: list[int], pull: Pull, is_opaque: bool) -> None:
        self.arrays, self.roles, self.pull, self.is_opaque = arrays, roles, pull, is_opaque

    def others(self) -> list[Any]:
        """Return the floating arrays that are neither inputs nor outputs."""
        pairs = zip(self.arrays, self.roles, strict=True)
        return [array for array, role in pairs if role == OTHER and FLOATING[array.dtype]]


def residuals_of(call: Call, run: Run, is_traced: Callable[[Run], bool]) -> Residuals:
    """Return the residuals of a run.

    Arguments:
        call, run: the call and its run.
        is_traced: returns whether the rule may use a traced array of an object. An opaque rule is then
            traced, because the array cannot be used later.
    """
    run.lift(call.f)
    pullback, template, specs = run.pullback, run.template, specs_of(run.inputs)

    def pull_lifted(
        arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool], transposed: bool = False
    ) -> Sequence[Any]:
        # Forward mode runs the rule only to transpose it.
        called = pullback.without_trace if transposed else pullback
        return called.pull(restore(template, arrays), upstream, needed, specs)

    traced = run.is_opaque and is_traced(run)
    if traced or (run.is_opaque and any_traced(pullback.values_in_scopes())):
        try:
            arrays, pull = _trace(run, specs)
            return Residuals(arrays, classify(arrays, run.inputs, run.outputs), pull, False)
        except _NEEDS_VALUES:
            if traced:
                raise
    return Residuals(run.residuals, run.roles, pull_lifted, run.is_opaque)


# The errors that JAX raises when a rule needs the value of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _trace(run: Run, specs: list[Spec | None]) -> tuple[list[Any], Pull]:
    """Trace an opaque rule, and return its arrays and a function that evaluates its jaxpr with them."""
    rule, inputs, outputs, pullback = run.rule, run.inputs, run.outputs, run.pullback
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
    # `pull` must not hold the arrays, which may be tracers.
    jaxpr, arrays = without_constants(traced), list(traced.consts)

    def pull(
        arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool], transposed: bool = False
    ) -> list[Any]:
        floating_upstream = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr, arrays, *floating_upstream)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(nonzero, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return arrays, pull


_HOST_ARRAYS = TypeSet(np.ndarray, np.generic)
_ARRAYS = TypeSet(jax.Array, jax.core.Tracer, np.ndarray, np.generic)


def constants_of(call: Call) -> list[Any]:
    """Return the arrays that a function can reach before it runs. Later, it may have stored further ones."""
    return [array for root in (call.f, *call.objects()) for array in reachable_tensors(root, _ARRAYS)]


def uses_intermediate(run: Run, residuals: Residuals, constants: Sequence[Any]) -> bool:
    """Return whether the rule uses an array that may depend on the inputs, other than inputs and outputs.

    The derivative of such an array goes through the function.

    Arguments:
        run, residuals: a run, and its residuals.
        constants: the arrays that the function could use before it ran.
    """
    if residuals.is_opaque:
        return True
    known, others = set(map(id, constants)), residuals.others()
    # Operations on tracers return tracers. Operations on a `WithoutTangent` return concrete arrays.
    are_concrete = any([isinstance(x, WithoutTangent) for x in run.inputs])
    if not are_concrete:
        others = [array for array in others if isinstance(array, jax.core.Tracer)]
    if any([id(array) not in known for array in others]):
        return True
    # With concrete arrays, the function may also have computed a NumPy array.
    on_host = lift(run.rule, _HOST_ARRAYS)[0] if are_concrete else ()
    return any([id(x) not in known and (x.dtype == object or FLOATING[x.dtype]) for x in on_host])
