"""What is kept of a call between forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from multigrad.backend import Call, Ran, Spec
from multigrad.backend.jax.tensors import (
    TENSORS,
    any_traced,
    is_differentiable,
    scatter,
    specs_of,
    varying_alike,
)
from multigrad.closure import lift, restore

Pull = Callable[[Sequence[Any], Sequence[Any], Sequence[bool]], Sequence[Any]]
"""Arrays of a rule, upstream gradients, and which gradients are needed, to gradients."""


@jax.tree_util.register_pytree_node_class
class Residuals:
    """A rule between forward and backward: arrays that JAX sees, and the code around them.

    `outputs` has the slots of `arrays` in which an output of the op stands, each with the output's index.
    `needed` says which gradients are of use to the derivative that this is for.
    """

    __slots__ = ("arrays", "needed", "outputs", "pull")

    def __init__(
        self,
        arrays: list[Any],
        pull: Pull,
        outputs: tuple[tuple[int, int], ...],
        needed: tuple[bool, ...],
    ) -> None:
        self.arrays, self.pull, self.outputs, self.needed = arrays, pull, outputs, needed

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, (self.pull, self.outputs, self.needed)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Residuals":
        return cls(list(arrays), *static)

    def tied_to(self, outputs: Sequence[Any], needed: tuple[bool, ...]) -> "Residuals":
        """With `outputs` where the function's own outputs stood, for a derivative that has use for these."""
        arrays = list(self.arrays)
        for slot, index in self.outputs:
            arrays[slot] = outputs[index]
        return Residuals(arrays, self.pull, self.outputs, needed)

    def __call__(self, upstream: Sequence[Any]) -> Sequence[Any]:
        return self.pull(self.arrays, upstream, self.needed)


Step = tuple[list[Any], Residuals]
"""The outputs of a function, and what its rule uses."""


def residuals_of(call: Call, ran: Ran, closed_over: Sequence[Any] = ()) -> Residuals:
    outputs, rule, inputs, back = ran
    if call.options.forward_mode:
        back = back.untraced  # in reverse mode, too, it is the transpose of a transpose that runs
    arrays, template, opaque = lift(rule, TENSORS, call.f)
    everything = (True,) * len(inputs)
    specs = specs_of(inputs)

    def pull_lifted(arrays: Sequence[Any], upstream: Sequence[Any], needed: Sequence[bool]) -> Sequence[Any]:
        return back.pull(restore(template, arrays), upstream, needed, specs)

    pull: Pull = pull_lifted
    if opaque and any_traced([*inputs, *outputs, *closed_over]):
        arrays, pull = _traced((outputs, rule, inputs, back), specs)
    # An output that the rule uses is differentiated by the rule; one that is an input is the input.
    places: dict[int, int] = {}
    for index, output in enumerate(outputs):
        places.setdefault(id(output), index)
    for array in inputs:
        places.pop(id(array), None)
    slots = tuple([(s, places[id(array)]) for s, array in enumerate(arrays) if id(array) in places])
    return Residuals(arrays, pull, slots, everything)


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
