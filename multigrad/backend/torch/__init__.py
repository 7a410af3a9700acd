"""PyTorch.

The native way to bind a custom derivative is a `torch.autograd.Function`: `forward` computes and saves
residuals on `ctx`, `backward` reads them. This backend differs in three points.

- The tensors in the rule's closure are saved, and the rule is rebuilt around them. So PyTorch sees every
  residual, and no output is in a reference cycle with its node.
- A second derivative goes through the residuals. `ctx.saved_tensors` returns inputs and outputs with their
  history. For an intermediate, the function runs again on the saved inputs with recording, and only if the
  backward pass itself is recorded.
- torch.func, forward mode and torch.compile each have a `Function` in the form that they accept.

A rule runs under the autocast settings of its function, wherever the backward pass is called, as with
`torch.amp.custom_fwd` and `custom_bwd`.

Files: `apply.py` for one call of an op, `eager.py` for eager code, `functorch.py` for torch.func and forward
mode, `compiled.py` for torch.compile and export, `gradients.py` for `grad` and `vjp`, `jit.py` for
`multigrad.jit`, `jit_derivatives.py` for the derivatives in its programs, `state.py`, and `tensors.py`.
"""

from multigrad.backend.defaults import *
from multigrad.backend.torch.apply import apply
from multigrad.backend.torch.gradients import (
    depends_on_element,
    depends_on_others,
    may_record,
    solve,
    value_and_grad,
    vjp,
    vjp_at_once,
    vmap,
    while_loop,
)
from multigrad.backend.torch.host_call import host_call, opaque_to_compiler
from multigrad.backend.torch.jit import compile_function, jit, without_compilation
from multigrad.backend.torch.state import is_compiling, trace_level
from multigrad.backend.torch.tensors import (
    FOREIGN,
    STAND_INS,
    TENSORS,
    concrete,
    conform,
    constant,
    defaults_of,
    is_differentiable,
    is_reading_code,
    observe,
    operations,
    snapshot,
    specs_of,
    update_wrapper,
    watch,
)

HAS_DEVICES = True
jvp = transposed(vjp)
map_rows = mapped(vmap)
