"""The arrays of JAX: types, dtypes, values and conversions."""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from multigrad.backend.base import S, Spec
from multigrad.backend.jax import private
from multigrad.common.errors import describe, message
from multigrad.common.keras_internals import scope_here, stored_value
from multigrad.common.reachable import UNREADABLE
from multigrad.common.type_sets import ATOMS, ForeignArrays, TypeSet

TENSORS = TypeSet(jax.Array, jax.core.Tracer)
FOREIGN = ForeignArrays(jax.Array, jax.core.Tracer, np.ndarray)
TRACERS = TypeSet(jax.core.Tracer)
TRACERS[private.CONCRETE_ARRAY] = False  # cached: the class of most arrays, which is defined in Python
# Classes of JAX whose objects have attributes and hold no tensor.
ATOMS.update(
    dict.fromkeys(
        (
            jax.ShapeDtypeStruct,
            jax.sharding.Mesh,
            jax.sharding.NamedSharding,
            jax.sharding.PartitionSpec,
            jax.sharding.SingleDeviceSharding,
            type(jnp.float32),
        ),
        True,
    )
)
UNREADABLE.append(private.VJP)
NUMBERS = TypeSet(bool, int, float, complex, np.ndarray, np.generic)


class _Subtypes(dict[Any, bool]):
    """The subtypes of a dtype. Each dtype is looked up once, and the answer is cached."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def __missing__(self, dtype: Any) -> bool:
        self[dtype] = member = bool(jnp.issubdtype(dtype, self._kind))
        return member


FLOATING = _Subtypes(jnp.inexact)
COMPLEX = _Subtypes(jnp.complexfloating)


def require_not_ended(variable: keras.Variable, value: Any) -> None:
    """Raise if the loop or the like that computed the value of a variable has ended."""
    if isinstance(value, jax.core.Tracer) and private.has_ended(value):
        raise TypeError(
            message(
                variable.path,
                "a variable is assigned in a loop, whose traced value cannot leave it",
                required="variables, such as the state of a keras.random.SeedGenerator, that are assigned "
                "outside of jax.lax.scan, jax.vmap, jax.checkpoint and similar functions",
                got=f"a traced {describe(value)}",
                fix="draw the random numbers before the loop, carry the value through the loop, or pass "
                "unroll=True to the RNN",
                see="limits#assign-outside-stateless",
            )
        )


def extend_pinned(pinned: S) -> S:
    """Return the subclass of `Pinned` that does not return a value that cannot be used."""

    def get_current_value(self: Any, variable: keras.Variable) -> Any:
        value = pinned.get_current_value(self, variable)
        if id(variable) in self.assigned:
            require_not_ended(variable, value)
        is_from_outside = self.rule is not None and id(variable) not in self.current
        if is_from_outside and TRACERS[type(value)] and private.is_of_other_trace(value):
            raise TypeError(_read_by_rule_alone(self.name, variable))
        return value

    extended: Any = type(pinned.__name__, (pinned,), {"get_current_value": get_current_value})
    return extended


def _read_by_rule_alone(name: str, variable: keras.Variable) -> str:
    return message(
        name,
        "the rule reads a variable that the function does not read, where its value is not available",
        required="a rule that reads only variables that its function reads",
        got=f"variable {variable.path!r}",
        fix="pass the variable to the op as an argument, and return None for its gradient",
        see="variables-and-layers#weights",
    )


def assign(variable: keras.Variable, value: Any) -> None:
    if isinstance(value, private.WithoutTangent):
        value = value.primal
    require_not_ended(variable, value)
    leaks = isinstance(value, jax.core.Tracer) and not isinstance(stored_value(variable), jax.core.Tracer)
    if leaks and scope_here() is None:
        raise TypeError(
            message(
                variable.path,
                "a traced value is assigned to a variable outside of a stateless scope, which would leak the "
                "tracer",
                required="a concrete value, or a keras.StatelessScope, as in `stateless_call`",
                got=f"a traced {describe(value)}",
                fix="compile with multigrad.jit in place of jax.jit, call the layer through "
                "`stateless_call`, or outside of jax.lax.scan and similar functions",
                see="limits#assign-outside-stateless",
            )
        )
    variable.assign(value)


def is_differentiable(tensor: Any) -> bool:
    return FLOATING[tensor.dtype]


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    return [(t.shape, t.dtype, None) if FLOATING[t.dtype] else None for t in tensors]


def conform(gradient: Any, spec: Spec) -> Any:
    shape, dtype, _ = spec
    extra = gradient.ndim - len(shape)
    sizes = zip(gradient.shape[extra:], shape, strict=True)
    axes = (*range(extra), *[extra + i for i, (got, wanted) in enumerate(sizes) if got != wanted])
    if axes:
        gradient = gradient.sum(axes).reshape(shape)
    if COMPLEX[gradient.dtype] and not COMPLEX[dtype]:
        gradient = gradient.real
    return gradient.astype(dtype)


def concrete(tensor: Any) -> np.ndarray | None:
    return None if isinstance(tensor, jax.core.Tracer) else np.asarray(tensor)


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    # Outside of jit it calls back at once, and in a vmap once for each element of the batch.
    jax.debug.callback(lambda *values: callback(*map(np.array, values)), *tensors)


def watch(callback: Callable[..., None], tensor: Any) -> Any:
    observe(callback, [tensor])
    return tensor


def wide() -> contextlib.AbstractContextManager[Any]:
    return private.enable_x64(True)


def is_compiling() -> bool:
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def is_ref(tracer: jax.core.Tracer) -> bool:
    """Return whether a tracer is a mutable array, which has no tangent itself."""
    return not isinstance(jax.typeof(tracer), jax.core.ShapedArray)


def any_traced(arrays: Sequence[Any]) -> bool:
    return any([TRACERS[type(array)] for array in arrays])


def gather(values: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    """Return the values where `where` is True."""
    return [value for value, marked in zip(values, where, strict=True) if marked]


def scatter(values: Sequence[Any], where: Sequence[bool]) -> list[Any]:
    """Return a list of the length of `where`, with the values where it is True and None elsewhere."""
    remaining = iter(values)
    return [next(remaining) if marked else None for marked in where]


def broadcast_along(axis: Any, array: Any, position: int) -> Any:
    """Return the array, broadcast along the axis of a `jax.vmap` that does not map it."""
    shape = array.shape
    return jnp.broadcast_to(
        jnp.expand_dims(array, position), (*shape[:position], axis.size, *shape[position:])
    )


def move_axes_first(
    arrays: Sequence[Any], axes: Sequence[int | None]
) -> tuple[list[Any], tuple[int | None, ...]]:
    """Return the arrays with their mapped axes first, and the mapped axis of each."""
    pairs = zip(as_arrays(arrays), axes, strict=True)
    moved = [jnp.moveaxis(array, axis, 0) if axis else array for array, axis in pairs]
    return moved, tuple([None if axis is None else 0 for axis in axes])


def as_arrays(values: Iterable[Any]) -> list[Any]:
    """Return the values, with numbers converted to arrays. JAX may return a traced number as a number."""
    return [v if TENSORS[type(v)] or not NUMBERS[type(v)] else jnp.asarray(v) for v in values]


def conjugate(arrays: Sequence[Any]) -> list[Any]:
    """Convert between JAX's cotangents and the gradients of the other frameworks, in both directions."""
    return [a.conj() if a is not None and COMPLEX[a.dtype] else a for a in arrays]


def varying_alike(arrays: list[Any]) -> list[Any]:
    """Return the arrays, varying along each axis of `jax.shard_map` along which one of them varies.

    JAX's operations convert their operands in the same way. The transpose is a sum over devices.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arrays
    varying = [private.varying_axes(array) for array in arrays]
    everywhere = frozenset().union(*varying)
    return [
        private.pcast(array, tuple(everywhere - axes), to="varying")
        for array, axes in zip(arrays, varying, strict=True)
    ]


def trace_level() -> Hashable:
    level: Hashable = private.trace_state(convention="flax")
    return level
