"""The primitive `strip`, which removes the tangents of the inputs of an op (see `primitives.py`)."""

from collections.abc import Sequence
from typing import Any

from multigrad.backend.jax import private
from multigrad.backend.jax.primitives import Linear, differentiate, empty_end, identity, zero_tangents
from multigrad.backend.jax.tensors import FLOATING, TRACERS, as_arrays, is_ref


class Strip:
    """Strips the tangents of arrays. Its equations refer to it.

    In eager code the derivatives around a call are visible at once: `traces` has the trace under each of
    them. In a program they come later, when the program is differentiated: `level` counts them for each
    equation. The first derivative uses the rule alone, so its tangents are always stripped. If the rule uses
    an intermediate result, later derivatives need the derivative of the function, and `is_open` lets their
    tangents pass.
    """

    __slots__ = ("__weakref__", "in_program", "is_open", "traces")

    def __init__(self) -> None:
        self.in_program = False
        """Whether a program has an equation of this object, and may be differentiated later."""
        self.is_open = False
        """Whether the tangents of derivatives after the first one pass."""
        self.traces: list[Any] | None = []
        """The trace under each derivative whose tangents were stripped, innermost derivative first, with None
        for a `jax.vmap` between two. None after the call."""

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays, where floating tracers are new objects without tangents.

        An operation on a concrete array does not tell it from its `stop_gradient`, as an outer derivative
        must. So if the gradient is being differentiated, a concrete result is a `WithoutTangent`.
        """
        traced = [i for i, x in enumerate(arrays) if TRACERS[type(x)] and FLOATING[x.dtype] and not is_ref(x)]
        stripped = list(arrays)
        if traced:
            results = _strip_p.bind(*[arrays[i] for i in traced], strip=self, level=0, end=empty_end())
            is_differentiated = self.order > 1 and not self.is_open
            for i, result in zip(traced, as_arrays(results), strict=True):
                is_wrapped = is_differentiated and not TRACERS[type(result)]
                stripped[i] = private.without_tangent(arrays[i], result) if is_wrapped else result
        return stripped

    @property
    def order(self) -> int:
        """The number of derivatives that are taken around the call in eager code."""
        # Several equations may be under one derivative.
        return len({id(trace) for trace in self.traces or () if trace is not None})

    @property
    def trace_below(self) -> Any:
        """The trace under the derivatives, None if there is none or a `jax.vmap` is inside of them."""
        traces = self.traces or []
        below = traces[: traces.index(None)] if None in traces else traces
        return below[-1] if below else None


_strip_p = identity()


def _other_objects(*arrays: Any, **params: Any) -> list[Any]:
    # Other objects, so that a residual is known as an input by its position: the value of the input may also
    # be another input, the value of a variable or a constant.
    return [private.other_object(array) for array in arrays]


def _types_of_stripped(*arrays: Any, strip: Strip, level: int, end: Any) -> list[Any]:
    """Return the types of the results, for which JAX asks when it adds an equation to a program."""
    strip.in_program = True
    return list(arrays)


def _linearize_strip(
    nonzero: Sequence[bool], *arrays: Any, strip: Strip, level: int, end: Any
) -> tuple[list[Any], Sequence[bool], Sequence[Any], Linear]:
    if strip.traces is not None:
        strip.traces.append(private.current_trace())
    params = {"strip": strip, "level": level + 1, "end": end}
    results = _strip_p.bind(*arrays, **params)
    if strip.is_open and level:
        return results, nonzero, (), lambda residuals, *tangents: list(tangents)
    zeros = zero_tangents(results)
    return results, [False] * len(results), (), lambda residuals, *tangents: zeros


def _map_strip(
    axis: Any, arrays: Sequence[Any], axes: Sequence[int | None], *, strip: Strip, **params: Any
) -> tuple[list[Any], Sequence[int | None]]:
    if strip.traces is not None:
        strip.traces.append(None)  # also where nothing is mapped: the function may use the name of the axis
    return _strip_p.bind(*arrays, strip=strip, **params), axes


_strip_p.def_impl(_other_objects)
_strip_p.def_abstract_eval(_types_of_stripped)
differentiate(_strip_p, _linearize_strip)
private.fancy_primitive_batchers[_strip_p] = _map_strip
