"""The residuals of a call: the arrays that its rule uses, and a function that calls the rule with them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from multigrad.backend.base import Call, Ran, Spec
from multigrad.backend.jax.private import WithoutTangent, without_constants
from multigrad.backend.jax.tensors import (
    FLOATING,
    TENSORS,
    any_traced,
    is_differentiable,
    scatter,
    specs_of,
    varying_alike,
)
from multigrad.core.closure import lift, restore
from multigrad.core.reachable import reachable_tensors
from multigrad.core.type_sets import TypeSet

Pull = Callable[[Sequence[Any], Sequence[Any], Sequence[bool]], Sequence[Any]]
"""Maps the arrays of a rule, the upstream gradients, and which gradients are needed, to the gradients."""

Slots = tuple[tuple[int, int], ...]
"""Pairs of an index among the arrays of a rule and an index among the outputs or inputs of the op."""


@jax.tree_util.register_pytree_node_class
class Residuals:
    """A rule between the forward and the backward pass, as a pytree of its arrays.

    Arguments:
        arrays: the arrays that the rule uses.
        pull: calls the rule with these arrays.
        outputs: the slots of arrays that are outputs of the op.
        inputs: the slots of arrays that are inputs of the op.
        computed: whether another array may be an intermediate result of the function, whose derivative goes
            through the function.
        needed: for each input, whether its gradient is used.
    """

    __slots__ = ("arrays", "computed", "inputs", "needed", "outputs", "pull")

    def __init__(
        self,
        arrays: list[Any],
        pull: Pull,
        outputs: Slots,
        inputs: Slots,
        computed: bool,
        needed: tuple[bool, ...],
    ) -> None:
        self.arrays, self.pull, self.needed = arrays, pull, needed
        self.outputs, self.inputs, self.computed = outputs, inputs, computed

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, (self.pull, self.outputs, self.inputs, self.computed, self.needed)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Residuals":
        return cls(list(arrays), *static)

    def tied_to(self, outputs: Sequence[Any], inputs: Sequence[Any], needed: tuple[bool, ...]) -> "Residuals":
        """Return the residuals with these outputs and inputs, for a derivative of the rule."""
        arrays = list(self.arrays)
        for slots, values in ((self.outputs, outputs), (self.inputs, inputs)):
            for slot, index in slots:
                arrays[slot] = values[index]
        return Residuals(arrays, self.pull, self.outputs, self.inputs, self.computed, needed)

    def with_tangents(self) -> "Residuals":
        """Return the residuals, whose arrays have tangents, so that the function need not run again."""
        return Residuals(self.arrays, self.pull, self.outputs, self.inputs, False, self.needed)

    def __call__(self, upstream: Sequence[Any]) -> Sequence[Any]:
        return self.pull(self.arrays, upstream, self.needed)


Step = tuple[list[Any], Residuals]
"""The outputs of a function and the residuals of its rule."""


def residuals_of(call: Call, ran: Ran, closed_over: Sequence[Any] = ()) -> Residuals:
    """Return the residuals of a run.

    Arguments:
        call, ran: the call and the result of its run.
        closed_over: the tracers that the function closes over.
    """
    outputs, rule, inputs, pullback = ran
    if call.options.forward_mode:
        pullback = pullback.untraced  # in both modes the rule runs only to be transposed
    arrays, template, opaque = lift(rule, TENSORS, call.f)
    specs = specs_of(inputs)

    def pull_lifted(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        return pullback.pull(restore(template, arrays), upstream, needed, specs)

    pull: Pull = pull_lifted
    if opaque:
        traced = any_traced([*inputs, *outputs, *closed_over])
        if traced or any_traced(pullback.values_in_scopes()):
            try:
                arrays, pull = _traced((outputs, rule, inputs, pullback), specs)
                opaque = False
            except _NEEDS_VALUES:
                if traced:
                    raise
    of_outputs, of_inputs, others = _slots(arrays, outputs, inputs)
    computed = opaque or (bool(others) and _are_computed(call, others, inputs, closed_over))
    for x in inputs:
        if WithoutTangent in type(x).__mro__:  # a call of `isinstance` would take longer
            computed = computed or _holds_computed_host_array(call, rule)
            break
    return Residuals(arrays, pull, of_outputs, of_inputs, computed, (True,) * len(inputs))


def _slots(
    arrays: Sequence[Any], outputs: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Slots, Slots, list[Any]]:
    """Return the slots of outputs, the slots of inputs, and the other floating arrays.

    An array that is an input and an output counts as the input.
    """
    indices_of_inputs = {id(array): index for index, array in reversed([*enumerate(inputs)])}
    indices = {id(array): index for index, array in reversed([*enumerate(outputs)])}
    of_inputs, of_outputs, others = [], [], []
    for slot, array in enumerate(arrays):
        if not FLOATING[array.dtype]:
            continue
        if id(array) in indices_of_inputs:
            of_inputs.append((slot, indices_of_inputs[id(array)]))
        elif id(array) in indices:
            of_outputs.append((slot, indices[id(array)]))
        else:
            others.append(array)
    return tuple(of_outputs), tuple(of_inputs), others


# The errors that JAX raises when a rule needs the value of a traced array.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _are_computed(
    call: Call, arrays: Sequence[Any], inputs: Sequence[Any], closed_over: Sequence[Any]
) -> bool:
    """Return whether an array may depend on the inputs: whether the function does not close over it."""
    # Operations on a `WithoutTangent` return concrete arrays. Operations on other tracers return tracers.
    if any_traced(inputs) and not any([isinstance(x, WithoutTangent) for x in inputs]):
        arrays = [array for array in arrays if isinstance(array, jax.core.Tracer)]
    constants = [*lift(call.f, TENSORS, borrowed=True)[0], *closed_over] if arrays else []
    constant_ids = set(map(id, constants))
    return any([id(array) not in constant_ids for array in arrays])


_HOST_ARRAYS = TypeSet(np.ndarray, np.generic)


def _holds_computed_host_array(call: Call, rule: Callable[..., Any]) -> bool:
    """Return whether a rule holds a NumPy array of floats or objects that the function may have computed."""
    roots = (call.f, *call.objects())
    constants = {id(array) for root in roots for array in reachable_tensors(root, _HOST_ARRAYS)}
    arrays = [array for array in lift(rule, _HOST_ARRAYS)[0] if id(array) not in constants]
    return any([array.dtype == object or FLOATING[array.dtype] for array in arrays])


def _traced(ran: Ran, specs: list[Spec | None]) -> tuple[list[Any], Pull]:
    """Trace an opaque rule, and return its arrays and a function that evaluates its jaxpr with them."""
    outputs, rule, inputs, pullback = ran
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

    def pull(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
        floating_upstream = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr, arrays, *floating_upstream)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(nonzero, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return arrays, pull
