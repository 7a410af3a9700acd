"""The names of JAX that a version may take away, each in one place, looked up when the backend is imported.

`jax.extend` and `jax.interpreters` are for libraries such as this one, and JAX (0.12) gives no promise for
them either. A name that is missing raises an ImportError here, unless a fallback is given.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from multigrad.frameworks import look_up

# A primitive says how an op is differentiated and mapped in each of JAX's traces. JAX has no public class for
# one (0.7 to 0.12).
Primitive = look_up("jax.extend.core.Primitive")
# A parameter of an equation, for which JAX's caches drop the equation's other parameters (0.7 to 0.12).
ClosedJaxpr = look_up("jax.extend.core.ClosedJaxpr")
# Whether a value is traced into a program and not differentiated or mapped at once (0.7 to 0.12).
DynamicJaxprTracer = look_up("jax.interpreters.partial_eval.DynamicJaxprTracer")
# Symbolic zeros, and the tables of the rules of primitives (0.7 to 0.12).
Zero = look_up("jax.interpreters.ad.Zero")
instantiate_zeros = look_up("jax.interpreters.ad.instantiate_zeros")
primitive_jvps = look_up("jax.interpreters.ad.primitive_jvps")
primitive_transposes = look_up("jax.interpreters.ad.primitive_transposes")
primitive_batchers = look_up("jax.interpreters.batching.primitive_batchers")
fancy_primitive_batchers = look_up("jax.interpreters.batching.fancy_primitive_batchers")

# How a primitive is compiled (0.7 to 0.12). Newer versions keep what they made for equal parameters, and the
# objects in them, unless `cacheable` is False. JAX 0.6 keeps nothing and has no such parameter.
_register_lowering = look_up("jax.interpreters.mlir.register_lowering")
_UNCACHED = {"cacheable": False} if "cacheable" in inspect.signature(_register_lowering).parameters else {}


def register_lowering(primitive: Any, rule: Callable[..., Any]) -> None:
    """Register how a primitive is compiled, without a cache that would keep its parameters."""
    _register_lowering(primitive, rule, **_UNCACHED)


# What reverse mode does with a primitive, for `reverse.py` (0.10). In other versions, or without one of these
# names, an op is a `jax.custom_vjp`, which gives the same derivatives in more time.
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


# Lets an array vary along an axis of `jax.shard_map`. It is public, and called `pvary` before JAX 0.9.
pcast = look_up("jax.lax.pcast", _pcast_by_pvary)


def varying_axes(array: Any) -> frozenset[Any]:
    """Return the axes of `jax.shard_map` along which an array varies.

    The attribute is `mat.varying` from JAX 0.10 on, and `vma` before. Neither is documented.
    """
    aval = jax.typeof(array)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma
