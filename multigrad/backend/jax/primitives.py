"""Primitives that change no value, and decide how their operands are differentiated and mapped."""

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
)
from multigrad.backend.jax.tensors import FLOATING, TENSORS, TRACERS, as_arrays, varying_alike
from multigrad.core.errors import message


def identity() -> Any:
    """A primitive that gives its operands as they are, of which one says how it is transformed.

    It costs nothing, and is gone from the compiled program. `jax.extend` and `jax.interpreters` are for
    this, but may change from one version to another (JAX 0.10). It has the name of JAX's own that is the
    identity, too, for programs that convert JAX's by names.
    """
    primitive = Primitive("optimization_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *operands, **_: list(operands))
    register_lowering(primitive, lambda _, *operands, **params: operands)
    return primitive


class TangentGate:
    """Takes the tangents off what a function runs on, so that JAX does not differentiate the function.

    In eager code the function then sees concrete values. In a program that is written down the gate is an
    equation, which a later derivative asks whether tangents pass.
    """

    def __init__(self) -> None:
        self.state = GateState()
        self._originals: dict[int, tuple[Any, Any]] = {}

    @property
    def met(self) -> bool:
        """Whether tangents were taken off: a derivative is being taken here, and not of a program alone."""
        return self.state.met

    def open(self) -> None:
        """Let tangents pass in a program: the rule uses something that the function computed."""
        self.state.open = True

    def strip(self, array: Any) -> Any:
        """Return the array without tangents."""
        if not TRACERS[type(array)] or not FLOATING[array.dtype]:
            return array
        (stripped,) = gate_p.bind(array, gate=self.state, end=ClosedJaxpr(NOTHING, ()))
        if not TENSORS[type(stripped)]:
            stripped = jnp.asarray(stripped)  # JAX traces Python numbers, too
        self._originals[id(stripped)] = array, stripped
        return stripped

    def original(self, array: Any) -> Any:
        """Return the array that `strip` was given for this one."""
        return self._originals.get(id(array), (array,))[0]


class GateState:
    """What the equations of a gate know of it."""

    __slots__ = ("met", "open")

    def __init__(self) -> None:
        self.met = self.open = False


gate_p = identity()
# JAX (0.10) keeps what it found out by the parameters of an equation until a jaxpr among them ends. Without
# one, it would keep the parameters, and what they hold, after the program. So such equations have this one.
NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


def _differentiate_gate(
    primals: Sequence[Any], tangents: Sequence[Any], *, gate: GateState, end: Any
) -> tuple[list[Any], list[Any]]:
    outputs = gate_p.bind(*primals, gate=gate, end=end)
    if gate.open:
        return outputs, list(tangents)
    gate.met = True
    return outputs, [Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]


def _map_gate(
    operands: Sequence[Any], places: Sequence[int | None], *, gate: GateState, end: Any
) -> tuple[list[Any], Sequence[int | None]]:
    return gate_p.bind(*operands, gate=gate, end=end), places


primitive_jvps[gate_p] = _differentiate_gate
primitive_batchers[gate_p] = _map_gate


def mapped_alike(name: str, outputs: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    """The outputs, mapped wherever something beside them is, and varying as that does."""
    outputs = varying_alike([*outputs, *beside])[: len(outputs)]
    return _mapped_alike_p.bind(*outputs, *beside, outputs=len(outputs), name=name)[: len(outputs)]


_mapped_alike_p = identity()


def _map_alike(
    axis: Any, operands: Sequence[Any], places: Sequence[int | None], *, outputs: int, name: str
) -> tuple[list[Any], Sequence[int | None]]:
    own, beside = list(operands[:outputs]), operands[outputs:]
    if any(place is not None for place in places[outputs:]):
        own = [
            jnp.broadcast_to(x, (axis.size, *x.shape)) if place is None else jnp.moveaxis(x, place, 0)
            for x, place in zip(as_arrays(own), places, strict=False)
        ]
        places = [*[0] * outputs, *places[outputs:]]
    return _mapped_alike_p.bind(*own, *beside, outputs=outputs, name=name), places


def _without_rule(primals: Sequence[Any], tangents: Sequence[Any], *, outputs: int, name: str) -> NoReturn:
    """It stands in what a rule differentiates, and so is differentiated only where JAX left the rule out."""
    raise NotImplementedError(
        message(
            name,
            "JAX differentiates the function itself, past its rule, as of every jax.custom_jvp there",
            required="a derivative that JAX takes by the rule",
            got="one of another derivative in a loop, of an op with forward_mode=True",
            fix="leave forward_mode out, or take both derivatives inside of the loop's body",
        )
    )


fancy_primitive_batchers[_mapped_alike_p] = _map_alike
primitive_jvps[_mapped_alike_p] = _without_rule
