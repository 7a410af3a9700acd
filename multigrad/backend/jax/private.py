"""The names of JAX that are not stable between versions. They are looked up when the backend is imported.

`jax.extend` and `jax.interpreters` are meant for libraries, but JAX (0.12) does not guarantee that they stay
compatible. A missing name raises an ImportError here, unless a fallback is given.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from multigrad.common.frameworks import look_up

# A primitive defines how each transformation of JAX handles an op. JAX has no public class for primitives
# (0.7 to 0.12).
Primitive = look_up("jax.extend.core.Primitive")
# With a parameter of this type, JAX's caches do not keep the other parameters of an equation alive (0.7 to
# 0.12).
ClosedJaxpr = look_up("jax.extend.core.ClosedJaxpr")
# Symbolic zeros, and the tables of the transformation rules of primitives (0.7 to 0.12).
Zero = look_up("jax.interpreters.ad.Zero")
instantiate_zeros = look_up("jax.interpreters.ad.instantiate_zeros")
primitive_jvps = look_up("jax.interpreters.ad.primitive_jvps")
primitive_transposes = look_up("jax.interpreters.ad.primitive_transposes")
fancy_primitive_batchers = look_up("jax.interpreters.batching.fancy_primitive_batchers")

# Register the lowering of a primitive (0.7 to 0.12). Versions with the parameter `cacheable` cache the
# lowering by the parameters of the primitive, and keep the objects in them alive, unless it is False.
_register_lowering = look_up("jax.interpreters.mlir.register_lowering")
_UNCACHED = {"cacheable": False} if "cacheable" in inspect.signature(_register_lowering).parameters else {}

# Return the lowering of a function that JAX can trace (0.7 to 0.12).
_lower_fun = look_up("jax.interpreters.mlir.lower_fun")


def lower_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering of a function that returns a list of arrays."""
    lowering: Callable[..., Any] = _lower_fun(function, multiple_results=True)
    return lowering


def register_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register the lowering of a primitive, without a cache that would keep its parameters alive."""
    _register_lowering(primitive, rule, **_UNCACHED)


class WithoutTangent:
    """A tracer in eager code whose value is concrete and whose tangent is zero.

    `jax.lax.stop_gradient(x)` of a concrete array is `x` itself. That of a tracer is another object. JAX has
    no public way to make a tracer (0.7 to 0.12). Operations on this one return concrete arrays.
    """

    __slots__ = ()
    primal: Any
    """The concrete value."""

    def to_concrete_value(self) -> None:
        """Return None, so that `jnp.asarray(x)` and `x.astype(x.dtype)` return `x` itself."""


def _of_value(name: str) -> Callable[..., Any]:
    return lambda tracer, *args, **kwargs: getattr(tracer.primal, name)(*args, **kwargs)


def trace_of(value: Any) -> Any:
    """Return the transformation to which a tracer belongs, or None for a concrete array (0.7 to 0.12)."""
    return value._trace if isinstance(value, jax.core.Tracer) else None


# What a concrete array can be converted to, and a tracer cannot.
for _name in (
    *("__array__", "__bool__", "__complex__", "__dlpack__", "__dlpack_device__", "__float__", "__format__"),
    *("__int__", "__repr__", "item", "tolist"),
):
    setattr(WithoutTangent, _name, _of_value(_name))


def without_tangent(tracer: Any, value: Any) -> Any:
    """Return a concrete value as a tracer of the derivative to which `tracer` belongs.

    `full_lower` removes the tracer of a `jax.vmap` that does not map the value (0.7 to 0.12).
    """
    tracer = tracer.full_lower()
    tracer_type: Any = type(tracer)
    zero = Zero(jax.typeof(value).to_tangent_aval())
    return _without_tangent(tracer_type)(tracer._trace, value, zero)


@functools.cache
def _without_tangent(tracer_type: Any) -> Any:
    return type("WithoutTangent", (WithoutTangent, tracer_type), {"__slots__": (), "__module__": __name__})


# Run code under another trace than the current one. In eager code, the function of an op runs under the trace
# below the derivatives, whose tangents it does not see: an operation is then dispatched eight times as fast.
# (`jax.extend.core` from 0.9 on)
_set_current_trace = look_up(
    "jax.extend.core.set_current_trace", lambda: look_up("jax._src.core.set_current_trace")
)
_take_current_trace = look_up(
    "jax.extend.core.take_current_trace", lambda: look_up("jax._src.core.take_current_trace")
)


# The trace under which JAX derives a missing linearization.
_LinearTrace = look_up("jax._src.interpreters.partial_eval.JaxprTrace")


def current_trace() -> Any:
    """Return the trace that evaluates operations here.

    JAX derives a missing linearization under a trace that records a program, above the trace that it wants.
    """
    with _take_current_trace() as trace:
        return trace.parent_trace if isinstance(trace, _LinearTrace) else trace


def under_trace(trace: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operations are evaluated by `trace`, by the current one if it is None."""
    return contextlib.nullcontext() if trace is None else _set_current_trace(trace)


# The trace of a program, whose frame says for which transformation it is made. JAX has no public way to ask
# which transformations trace this code (0.7 to 0.12).
_ProgramTrace = look_up("jax._src.interpreters.partial_eval.DynamicJaxprTrace")


def _active_traces() -> Iterator[Any]:
    """Yield the current trace, and the traces around it."""
    trace = current_trace()
    yield trace
    while hasattr(trace, "parent_trace"):  # not that of eager code, or of a `jax.shard_map` in it
        trace = trace.parent_trace
        yield trace


def is_in_jit() -> bool:
    """Return whether this code is traced by `jax.jit`.

    A scan or checkpoint in eager code is traced in each call, and `jax.jit` is not.
    """
    programs = [trace for trace in _active_traces() if isinstance(trace, _ProgramTrace)]
    return any([program.frame.debug_info.traced_for == "jit" for program in programs])


def has_ended(tracer: Any) -> bool:
    """Return whether the trace of a tracer has ended, such as that of a loop.

    JAX raises an error only when such a tracer is used.
    """
    return all([trace is not tracer._trace for trace in _active_traces()])


def is_of_other_trace(tracer: Any) -> bool:
    """Return whether a tracer cannot be used here: its trace has ended, or a program is traced in it.

    The transpose of a program, such as a loop, takes no further arguments. That of a checkpoint does.
    """
    here = current_trace()
    if tracer._trace is here:
        return False
    is_program = isinstance(here, _ProgramTrace) and "checkpoint" not in here.frame.debug_info.traced_for
    return is_program or has_ended(tracer)


# The table of the linearizations of primitives. Without an entry, JAX derives one from the jvp, in
# ten times the time.
_primitive_linearizations = look_up("jax._src.interpreters.ad.primitive_linearizations", lambda: None)
# A linearization returns four values in 0.10.0 to 0.11.0, and five in 0.11.1 to 0.12. Before, it has another
# form, and later versions may change it: a wrong number raises an error at the first gradient.
_IS_KNOWN = _primitive_linearizations is not None and (0, 10) <= jax.__version_info__ < (0, 13)


def define_linearization(primitive: Any, linearize: Callable[..., tuple[Any, ...]]) -> None:
    """Define how JAX linearizes a primitive. `backend/jax/primitives.py` describes `linearize`."""

    def four(is_vjp: bool, nonzero: Any, *primals: Any, **params: Any) -> tuple[Any, ...]:
        return linearize(nonzero, *primals, **params)

    def five(is_vjp: bool, nonzero: Any, *primals: Any, **params: Any) -> tuple[Any, ...]:
        results, has_tangent, residuals, linear = linearize(nonzero, *primals, **params)
        return results, has_tangent, residuals, None, lambda residuals, _, *ts: linear(residuals, *ts)

    if _IS_KNOWN:
        _primitive_linearizations[primitive] = four if jax.__version_info__ < (0, 11, 1) else five


# The class of arrays, whose constructor makes another object for the same buffers (0.7 to 0.12).
CONCRETE_ARRAY = look_up("jax._src.array.ArrayImpl", lambda: None)
_HAS_BUFFERS = hasattr(CONCRETE_ARRAY, "_arrays")


def other_object(array: Any) -> Any:
    """Return another object with the value of a concrete array. The public way takes ten times as long."""
    if not isinstance(array, jax.Array):
        array = jax.numpy.asarray(array)  # JAX also traces Python numbers
    if _HAS_BUFFERS and type(array) is CONCRETE_ARRAY:
        return CONCRETE_ARRAY(array.aval, array.sharding, array._arrays, array.committed, _skip_checks=True)
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


# The 64-bit mode of a block. It became public in JAX 0.8.
enable_x64 = look_up("jax.enable_x64", lambda: look_up("jax.experimental.enable_x64"))


def _pcast_by_pvary() -> Callable[..., Any]:
    pvary = look_up("jax.lax.pvary")
    return lambda array, axes, to: pvary(array, axes)


# Let an array vary along an axis of `jax.shard_map`. The public function is `pvary` before JAX 0.9.
pcast = look_up("jax.lax.pcast", _pcast_by_pvary)


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes of `jax.shard_map` along which an array varies.

    The attribute is `mat.varying` from JAX 0.10 on, and `vma` before. Neither is documented.
    """
    aval = jax.typeof(array)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


# The class of the function that `jax.vjp` returns, which holds arrays (0.10 to 0.12), and its class before.
VJP = look_up("jax._src.api.VJP", lambda: look_up("jax.tree_util.Partial"))


# Compare the transformations that trace code in two places. (`jax.extend.core` from 0.9 on)
trace_state = look_up(
    "jax.extend.core.get_opaque_trace_state", lambda: look_up("jax.core.get_opaque_trace_state")
)
