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

    In eager code the function then gets concrete arrays, or `WithoutTangent`s if an outer derivative must
    tell an array from its `stop_gradient`. Each one is a new object, so that a residual is known by the
    position of the input.

    In a traced program the gate is one equation for all inputs. It strips tangents when the program is
    differentiated later. If the rule uses an intermediate result, the gate opens for the derivatives after
    the first one of the call, which uses the rule alone.

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
        return self.state.equations > 0

    @property
    def is_open(self) -> bool:
        """Whether the gate passes tangents in a program."""
        return self.state.open_from is not None

    def open(self, taken: bool) -> None:
        """Let the tangents of derivatives after the first one of the call pass in a program.

        The gate stays closed if it does not know which derivative is the first. This is the case if the
        function read traced variables: they are in other equations than the arguments. A later derivative
        then runs the function again (`TiedOp.run_traced`).

        Arguments:
            taken: whether the first derivative of the call is being taken.
        """
        if taken:
            self.state.open_from = 0
        elif self.state.equations == 1:
            self.state.open_from = 1

    def strip(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays without tangents."""
        traced = [i for i, x in enumerate(arrays) if TRACERS[type(x)] and FLOATING[x.dtype]]
        stripped = list(arrays)
        if traced:
            before, end = self.state.stripped, ClosedJaxpr(NOTHING, ())
            results = gate_p.bind(*[arrays[i] for i in traced], gate=self.state, level=0, end=end)
            order = self.state.stripped - before
            for i, result in zip(traced, results, strict=True):
                stripped[i] = self._known(arrays[i], result, order)
        return stripped

    def _known(self, original: Any, stripped: Any, order: int) -> Any:
        """Return the stripped array as a new object, if a derivative of this order is being taken."""
        if not TENSORS[type(stripped)]:
            stripped = jnp.asarray(stripped)  # JAX also traces Python numbers
        if not order or TRACERS[type(stripped)]:
            return stripped
        if order > self._concrete_order:
            return without_tangent(original, stripped)
        self.made_concrete = True
        return _other_object(stripped)


def _other_object(array: Any) -> Any:
    """Return a concrete array with the same buffer.

    A residual is known as an input by being the object that the function got for this input. The value of the
    input itself may also be another input, the value of a variable or a constant.
    """
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


class GateState:
    """The state of a gate, to which its equations refer."""

    __slots__ = ("equations", "open_from", "stripped")

    def __init__(self) -> None:
        self.stripped = 0
        """How often tangents were stripped."""
        self.equations = 0
        """How many equations of the gate are in programs."""
        self.open_from: int | None = None
        """The level from which equations pass tangents. The level is the number of earlier derivatives."""

    def passes(self, level: int) -> bool:
        """Return whether an equation passes tangents. If not, note that it strips them."""
        if self.open_from is not None and level >= self.open_from:
            return True
        self.stripped += 1
        return False


gate_p = identity()
# JAX (0.10) caches results by the parameters of an equation, and drops them when a jaxpr among the parameters
# is freed. Without one, the cache would keep the parameters alive longer than the program. So equations get
# this one.
NOTHING = jax.make_jaxpr(lambda: ())().jaxpr


def _type_of_gate(*operands: Any, gate: GateState, level: int, end: Any) -> list[Any]:
    """Return the types of the results, for which JAX asks when it adds the equation to a program."""
    gate.equations += level == 0
    return list(operands)


def _differentiate_gate(
    primals: Sequence[Any], tangents: Sequence[Any], *, gate: GateState, level: int, end: Any
) -> tuple[list[Any], list[Any]]:
    outputs = gate_p.bind(*primals, gate=gate, level=level + 1, end=end)
    return outputs, list(tangents) if gate.passes(level) else zeros_like_tangents(outputs)


def zeros_like_tangents(outputs: Sequence[Any]) -> list[Any]:
    """Return symbolic zeros as the tangents of outputs."""
    return [Zero(jax.typeof(output).to_tangent_aval()) for output in outputs]


def _map_gate(
    operands: Sequence[Any], axes: Sequence[int | None], **params: Any
) -> tuple[list[Any], Sequence[int | None]]:
    return gate_p.bind(*operands, **params), axes


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
