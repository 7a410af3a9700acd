"""Primitives that change nothing, but say how what they are given is transformed."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from multigrad.backend.jax.tensors import as_arrays, varying_alike
from multigrad.errors import message


def identity() -> Primitive:
    """A primitive that gives its operands as they are, of which one says how it is transformed.

    It costs nothing, and is gone from the compiled program. `jax.extend` and `jax.interpreters` are for
    this, but may change from one version to another (JAX 0.10). It has the name of JAX's own that is the
    identity, too, for programs that convert JAX's by names.
    """
    primitive = Primitive("optimization_barrier")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, **_: list(operands))
    primitive.def_abstract_eval(lambda *operands, **_: list(operands))
    mlir.register_lowering(primitive, lambda _, *operands, **params: operands, cacheable=False)
    return primitive


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
            mend="leave forward_mode out, or take both derivatives inside of the loop's body",
        )
    )


batching.fancy_primitive_batchers[_mapped_alike_p] = _map_alike
ad.primitive_jvps[_mapped_alike_p] = _without_rule
