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
`multigrad.jit`, `traced.py` for the derivatives in its programs, `state.py`, and `tensors.py`.
"""

from multigrad.backend.base import Backend
from multigrad.backend.torch import gradients, state, tensors
from multigrad.backend.torch.apply import apply
from multigrad.backend.torch.host_call import host_call, opaque_to_compiler
from multigrad.backend.torch.jit import compile_function, jit, without_compilation


class TorchBackend(Backend):
    """The implementation for PyTorch."""

    TENSORS = tensors.TENSORS
    FOREIGN = tensors.FOREIGN
    HAS_DEVICES = True
    STAND_INS = tensors.STAND_INS
    apply = staticmethod(apply)
    value_and_grad = staticmethod(gradients.value_and_grad)
    vjp = staticmethod(gradients.vjp)
    vjp_at_once = staticmethod(gradients.vjp_at_once)
    vmap = staticmethod(gradients.vmap)
    depends_on_element = staticmethod(gradients.depends_on_element)
    while_loop = staticmethod(gradients.while_loop)
    solve = staticmethod(gradients.solve)
    is_differentiable = staticmethod(tensors.is_differentiable)
    specs_of = staticmethod(tensors.specs_of)
    conform = staticmethod(tensors.conform)
    concrete = staticmethod(tensors.concrete)
    observe = staticmethod(tensors.observe)
    watch = staticmethod(tensors.watch)
    may_record = staticmethod(gradients.may_record)
    compile_function = staticmethod(compile_function)
    is_compiling = staticmethod(state.is_compiling)
    host_call = staticmethod(host_call)
    opaque_to_compiler = staticmethod(opaque_to_compiler)
    trace_level = staticmethod(state.trace_level)
    jit = staticmethod(jit)
    operations = staticmethod(tensors.operations)
    constant = staticmethod(tensors.constant)
    update_wrapper = staticmethod(tensors.update_wrapper)
    is_reading_code = staticmethod(tensors.is_reading_code)
    defaults_of = staticmethod(tensors.defaults_of)
    snapshot = staticmethod(tensors.snapshot)
    depends_on_others = staticmethod(gradients.depends_on_others)
    without_compilation = staticmethod(without_compilation)


ACTIVE = TorchBackend()
