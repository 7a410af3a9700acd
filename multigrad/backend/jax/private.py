"""The names of JAX that are not stable between versions. They are looked up when the backend is imported.

`jax.extend` and `jax.interpreters` are meant for libraries, but JAX (0.12) does not guarantee that they stay
compatible. A missing name raises an ImportError here, unless a fallback is given.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from multigrad.frameworks import look_up

# A primitive defines how each transformation of JAX handles an op. JAX has no public class for primitives
# (0.7 to 0.12).
Primitive = look_up("jax.extend.core.Primitive")
# With a parameter of this type, JAX's caches do not keep the other parameters of an equation alive (0.7 to
# 0.12).
ClosedJaxpr = look_up("jax.extend.core.ClosedJaxpr")
# The tracer of a value that is traced into a program, as in `jax.jit` (0.7 to 0.12).
DynamicJaxprTracer = look_up("jax.interpreters.partial_eval.DynamicJaxprTracer")
# Symbolic zeros, and the tables of the transformation rules of primitives (0.7 to 0.12).
Zero = look_up("jax.interpreters.ad.Zero")
instantiate_zeros = look_up("jax.interpreters.ad.instantiate_zeros")
primitive_jvps = look_up("jax.interpreters.ad.primitive_jvps")
primitive_transposes = look_up("jax.interpreters.ad.primitive_transposes")
primitive_batchers = look_up("jax.interpreters.batching.primitive_batchers")
fancy_primitive_batchers = look_up("jax.interpreters.batching.fancy_primitive_batchers")

# Register the lowering of a primitive (0.7 to 0.12). Versions with the parameter `cacheable` cache the
# lowering by the parameters of the primitive, and keep the objects in them alive, unless it is False.
_register_lowering = look_up("jax.interpreters.mlir.register_lowering")
_UNCACHED = {"cacheable": False} if "cacheable" in inspect.signature(_register_lowering).parameters else {}


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


# Define the reverse mode of a primitive, for `reverse.py` (0.10). In other versions, or without one of these
# names, an op is a `jax.custom_vjp`, which computes the same derivatives with more overhead.
LinearizeTrace = look_up("jax._src.interpreters.ad.LinearizeTrace", lambda: None)
primitive_linearizations = look_up("jax._src.interpreters.ad.primitive_linearizations", lambda: None)
set_current_trace = look_up("jax.extend.core.set_current_trace", lambda: None)
REVERSE_IS_KNOWN = jax.__version_info__[:2] == (0, 10) and None not in (
    LinearizeTrace,
    primitive_linearizations,
    set_current_trace,
)

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


def without_constants(traced: Any) -> Any:
    """Return a jaxpr without its constants, which `jax.core.eval_jaxpr` gets as arguments.

    From JAX 0.11 on, a jaxpr holds its constants, which may be tracers. The attribute is not documented.
    """
    jaxpr = traced.jaxpr
    return jaxpr.replace(consts=[]) if hasattr(jaxpr, "consts") else jaxpr
