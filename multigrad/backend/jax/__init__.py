"""JAX.

The native way to bind a custom derivative is `jax.custom_vjp`: `fwd` returns outputs and residuals, `bwd`
maps residuals and cotangents to gradients. This backend differs in five points.

- JAX refuses a `bwd` that closes over tracers. Here those in the closure of the rule become operands. The
  derivative with respect to a tracer that the function closes over raises an error.
- The function runs on values without tangents, before the derivative is defined. Its outputs are then tied
  to the inputs by the rule, so that an outer derivative goes through the rule and not through `fwd`.
- Both modes are defined: forward mode uses the transpose of the rule.
- In `jax.vmap`, an output that does not depend on a mapped input would be unmapped, and its upstream gradient
  the sum over the batch. Here an output is mapped wherever an input or a residual is.
- Cotangents of complex arrays are the conjugates of the gradients of TensorFlow and PyTorch. The rule gets
  gradients in the convention of the latter.

Files: `apply.py` for one call of an op, `strip.py` and `primitives.py` for its derivatives, `residuals.py`
for the arrays that the rule uses, `tensors.py`, `private.py` for unstable names of JAX, `gradients.py` for
`grad` and `vjp`, `jit.py` and `host_call.py`.
"""

from multigrad.backend.defaults import *
from multigrad.backend.jax.apply import apply
from multigrad.backend.jax.gradients import (
    compile_function,
    depends_on_element,
    jvp,
    may_record,
    operations,
    value_and_grad,
    vjp,
    vmap,
    without_compilation,
)
from multigrad.backend.jax.gradients import vjp as vjp_at_once
from multigrad.backend.jax.host_call import host_call
from multigrad.backend.jax.jit import is_constant, jit
from multigrad.backend.jax.tensors import (
    FOREIGN,
    TENSORS,
    assign,
    concrete,
    conform,
    extend_pinned,
    is_compiling,
    is_differentiable,
    observe,
    specs_of,
    trace_level,
    watch,
    wide,
)

TRACES_ONCE = True
FORWARD_OVER_REVERSE = True
map_rows = mapped(vmap)
