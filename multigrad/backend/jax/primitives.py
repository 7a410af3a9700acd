"""Primitives that return their operands, and define how these are differentiated and mapped."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from multigrad.backend.jax.private import (
    ClosedJaxpr,
    Primitive,
    Zero,
    fancy_primitive_batchers,
    primitive_batchers,
    primitive_jvps,
    register_lowering,
    without_tangent,
)
from multigrad.backend.jax.tensors import FLOATING, TENSORS, TRACERS, as_arrays, varying_alike
from multigrad.core.errors import message


def identity() -> Any:
    """Return a primitive that returns its operands. Its transformation rules are added by the caller.

    It is not in the compiled program. `jax.extend` and `jax.interpreters` are public, but may change between
    versions (JAX 0.10). The primitive has the name of JAX's own identity, for converters to other formats,
    which know primitives by their names.
    """
    primitive = Primitive("optimization_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *operands, **_: list(operands))
    register_lowering(primitive, lambda _, *operands, **params: operands)
    return primitive


class TangentGate:
    """Strips the tangents of the arrays on which a function runs, so that JAX does not differentiate it.

    In eager code the function then gets a concrete array, or a `WithoutTangent` if an outer derivative must
    tell the array from its `stop_gradient`. Each one is a new object, so that a residual is known by the
    position of the input. In a traced program the gate is an equation. When the program is differentiated
    later, the equation passes tangents if the gate is open.

    Arguments:
        concrete_order: the highest order of a derivative for which eager code gets concrete arrays.
    """

    def __init__(self, concrete_order: int) -> None:
        self.state, self._concrete_order = GateState(), concrete_order
        self.made_concrete = False
        """Whether an array whose tangents were stripped is concrete."""

    @property
    def met(self) -> bool:
        """Whether tangents were stripped, because a derivative is being taken here."""
        return self.state.stripped > 0

    @property
    def is_in_program(self) -> bool:
        """Whether a program contains the gate, which may be differentiated later."""
        return self.state.in_program

    @property
    def is_open(self) -> bool:
        """Whether tangents pass in a program."""
        return self.state.open

    def open(self) -> None:
        """Let tangents pass in a program, because the rule uses an intermediate result of the function.

        This is right only if a derivative is being taken here, as the first derivative uses the rule alone.
        """
        self.state.open = True

    def strip(self, array: Any) -> Any:
        """Return the array without tangents."""
        if not TRACERS[type(array)] or not FLOATING[array.dtype]:
            return array
        stripped_before = self.state.stripped
        (stripped,) = gate_p.bind(array, gate=self.state, end=ClosedJaxpr(NOTHING, ()))
        if not TENSORS[type(stripped)]:
            stripped = jnp.asarray(stripped)  # JAX also traces Python numbers
        order = self.state.stripped - stripped_before
        if order and not TRACERS[type(stripped)]:
            if order > self._concrete_order:
                stripped = without_tangent(array, stripped)
            else:
                stripped = _other_object(stripped)
                self.made_concrete = True
        return stripped


def _other_object(array: Any) -> Any:
    """Return a concrete array with the same buffer.

    A residual is known as an input by being the object that the function got for this input. The value of the
    input itself may also be another input, the value of a variable or a constant.
    """
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


class GateState:
    """The state of a gate, to which its equations refer."""

    __slots__ = ("in_program", "open", "stripped")

    def __init__(self) -> None:
        self.in_program, self.open, self.stripped = False, False, 0


gate_p = identity()
# JAX (0.10) caches results by the parameters of an equation, and drops them when a jaxpr among the parameters
# is freed. Without one, the cache would keep the parameters alive longer than the program. So equations get
# this one.
NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


def _type_of_gate(operand: Any, *, gate: GateState, end: Any) -> list[Any]:
    """Return the type of the result, for which JAX asks when it adds the equation to a program."""
    gate.in_program = True
    return [operand]


def _differentiate_gate(
    primals: Sequence[Any], tangents: Sequence[Any], *, gate: GateState, end: Any
) -> tuple[list[Any], list[Any]]:
    outputs = gate_p.bind(*primals, gate=gate, end=end)
    if gate.open:
        return outputs, list(tangents)
    gate.stripped += 1
    return outputs, [Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]


def _map_gate(
    operands: Sequence[Any], axes: Sequence[int | None], *, gate: GateState, end: Any
) -> tuple[list[Any], Sequence[int | None]]:
    return gate_p.bind(*operands, gate=gate, end=end), axes


gate_p.def_abstract_eval(_type_of_gate)
primitive_jvps[gate_p] = _differentiate_gate
primitive_batchers[gate_p] = _map_gate


def mapped_alike(name: str, outputs: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return the outputs, mapped by each `jax.vmap` that maps one of the sources, and varying like these."""
    outputs = varying_alike([*outputs, *sources])[: len(outputs)]
    return _mapped_alike_p.bind(*outputs, *sources, outputs=len(outputs), name=name)[: len(outputs)]


_mapped_alike_p = identity()


def _map_alike(
    axis: Any, operands: Sequence[Any], axes: Sequence[int | None], *, outputs: int, name: str
) -> tuple[list[Any], Sequence[int | None]]:
    arrays, sources = list(operands[:outputs]), operands[outputs:]
    if any(a is not None for a in axes[outputs:]):
        arrays = [
            jnp.broadcast_to(x, (axis.size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0)
            for x, a in zip(as_arrays(arrays), axes, strict=False)
        ]
        axes = [*[0] * outputs, *axes[outputs:]]
    return _mapped_alike_p.bind(*arrays, *sources, outputs=outputs, name=name), axes


def _without_rule(primals: Sequence[Any], tangents: Sequence[Any], *, outputs: int, name: str) -> NoReturn:
    """Raise an error. JAX differentiates this primitive only if it has dropped the rule around it."""
    raise NotImplementedError(
        message(
            name,
            "JAX differentiates the function itself instead of its rule, as it does for any jax.custom_jvp",
            required="a derivative that goes through the rule",
            got="a derivative of a derivative in a loop, with an op that has forward_mode=True",
            fix="omit forward_mode, or take both derivatives inside of the loop's body",
            see="jax#forward-mode",
        )
    )


fancy_primitive_batchers[_mapped_alike_p] = _map_alike
primitive_jvps[_mapped_alike_p] = _without_rule
