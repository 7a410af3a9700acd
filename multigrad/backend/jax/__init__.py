"""JAX.

The native way to bind a custom derivative is `jax.custom_vjp`: `fwd` returns outputs and residuals, `bwd`
maps residuals and cotangents to gradients. This backend differs in five points.

- A function that closes over tracers is an error in JAX. Here they are lifted and become arguments. The rule
  has no gradient for them, as on the other backends.
- The function runs on values without tangents, before the derivative is defined. Its outputs are then tied
  to the inputs by the rule, so that an outer derivative goes through the rule and not through `fwd`.
- Both modes are defined: forward mode uses the transpose of the rule.
- In `jax.vmap`, an output that does not depend on a mapped input would be unmapped, and its upstream gradient
  the sum over the batch. Here an output is mapped wherever an input or a residual is.
- Cotangents of complex arrays are the conjugates of the gradients of TensorFlow and PyTorch. The rule gets
  gradients in the convention of the latter.

Files: `apply.py` for one call of an op, `primitives.py` for its derivatives, `residuals.py` for the arrays
that the rule uses, `tensors.py`, `private.py` for unstable names of JAX, `gradients.py` for `grad` and `vjp`,
`jit.py` and `host_call.py`.
"""

from multigrad.backend.base import Backend
from multigrad.backend.jax import gradients, tensors
from multigrad.backend.jax.apply import apply
from multigrad.backend.jax.host_call import host_call
from multigrad.backend.jax.jit import is_constant, jit


class JaxBackend(Backend):
    """The implementation for JAX."""

    TENSORS = tensors.TENSORS
    FOREIGN = tensors.FOREIGN
    TRACES_ONCE = True
    apply = staticmethod(apply)
    value_and_grad = staticmethod(gradients.value_and_grad)
    vjp = staticmethod(gradients.vjp)
    vmap = staticmethod(gradients.vmap)
    depends_on_element = staticmethod(gradients.depends_on_element)
    is_differentiable = staticmethod(tensors.is_differentiable)
    specs_of = staticmethod(tensors.specs_of)
    conform = staticmethod(tensors.conform)
    concrete = staticmethod(tensors.concrete)
    observe = staticmethod(tensors.observe)
    may_record = staticmethod(gradients.may_record)
    compile_function = staticmethod(gradients.compile_function)
    operations = staticmethod(gradients.operations)
    is_compiling = staticmethod(tensors.is_compiling)
    host_call = staticmethod(host_call)
    trace_level = staticmethod(tensors.trace_level)
    jit = staticmethod(jit)
    is_constant = staticmethod(is_constant)
    assign = staticmethod(tensors.assign)
    extend_pinned = staticmethod(tensors.extend_pinned)
    wide = staticmethod(tensors.wide)
    without_compilation = staticmethod(gradients.without_compilation)


ACTIVE = JaxBackend()
