"""What is kept of a call between forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from multigrad.backend.base import Call, Ran, Spec
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

Pull = Callable[[Sequence[Any], Sequence[Any], Sequence[bool]], Sequence[Any]]
"""Arrays of a rule, upstream gradients, and which gradients are needed, to gradients."""

Slots = tuple[tuple[int, int], ...]


@jax.tree_util.register_pytree_node_class
class Residuals:
    """A rule between forward and backward: arrays that JAX sees, and the code around them.

    Arguments:
        arrays: what the rule uses.
        pull: the code.
        outputs, inputs: the slots of `arrays` that hold an output or an input of the op, each with its index.
        computed: whether another slot may hold something that the function computed from its inputs, whose
            derivative is that of the function.
        needed: which gradients are of use to the derivative that this is for.
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
        """Return the residuals around these outputs and inputs, for a derivative of the rule."""
        arrays = list(self.arrays)
        for slots, values in ((self.outputs, outputs), (self.inputs, inputs)):
            for slot, index in slots:
                arrays[slot] = values[index]
        return Residuals(arrays, self.pull, self.outputs, self.inputs, self.computed, needed)

    def settled(self) -> "Residuals":
        """Return the same, where what the function computed carries its own tangents."""
        return Residuals(self.arrays, self.pull, self.outputs, self.inputs, False, self.needed)

    def __call__(self, upstream: Sequence[Any]) -> Sequence[Any]:
        return self.pull(self.arrays, upstream, self.needed)


Step = tuple[list[Any], Residuals]
"""The outputs of a function, and what its rule uses."""


def residuals_of(call: Call, ran: Ran, closed_over: Sequence[Any] = ()) -> Residuals:
    """Return what the rule of a run uses. The function closes over the tracers `closed_over`."""
    outputs, rule, inputs, back = ran
    if call.options.forward_mode:
        back = back.untraced  # in reverse mode, too, it is the transpose of a transpose that runs
    arrays, template, opaque = lift(rule, TENSORS, call.f)
    specs = specs_of(inputs)

    def pull_lifted(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        return back.pull(restore(template, arrays), upstream, needed, specs)

    pull: Pull = pull_lifted
    if opaque:
        traced = any_traced([*inputs, *outputs, *closed_over])
        if traced or back.outer_scope is not None:
            try:
                arrays, pull = _traced((outputs, rule, inputs, back), specs)
                opaque = False
            except _NEEDS_VALUES:
                if traced:
                    raise
    of_outputs, of_inputs, others = _slots(arrays, outputs, inputs)
    computed = opaque or (bool(others) and _are_computed(call, others, inputs))
    return Residuals(arrays, pull, of_outputs, of_inputs, computed, (True,) * len(inputs))


def _slots(
    arrays: Sequence[Any], outputs: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Slots, Slots, list[Any]]:
    """Return the slots of arrays that are outputs and inputs, with their indices, and the other arrays.

    An output that the rule uses is differentiated by the rule; one that is an input is the input.
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


# What JAX raises where a rule asks a traced array for its value.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _are_computed(call: Call, arrays: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Return whether one of the arrays may depend on the inputs: it is no constant of the function."""
    if any_traced(inputs):
        arrays = [array for array in arrays if isinstance(array, jax.core.Tracer)]
    constants = set(map(id, lift(call.f, TENSORS, borrowed=True)[0])) if arrays else set()
    return any([id(array) not in constants for array in arrays])


def _traced(ran: Ran, specs: list[Spec | None]) -> tuple[list[Any], Pull]:
    """The arrays that a rule uses, where some may be reached through an object that cannot be lifted."""
    outputs, rule, inputs, back = ran
    places: list[int] = []

    def flat(*upstream: Any) -> list[Any]:
        gradients = back.pull(rule, scatter(upstream, floating), [True] * len(inputs), specs)
        places[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[i] for i in places]

    floating = [is_differentiable(output) for output in outputs]
    own = [output for output, f in zip(outputs, floating, strict=True) if f]
    like: list[Any] = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in own]
    if jax.sharding.get_abstract_mesh().manual_axes:
        like = varying_alike([*own, *inputs])[: len(own)]  # only an array says along what it varies
    jaxpr = jax.make_jaxpr(flat)(*like)

    def pull(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
        own = [u for u, f in zip(upstream, floating, strict=True) if f]
        answer = jax.core.eval_jaxpr(jaxpr.jaxpr, arrays, *own)
        gradients: list[Any] = [None] * len(needed)
        for i, gradient in zip(places, answer, strict=True):
            gradients[i] = gradient
        return gradients

    return list(jaxpr.consts), pull
