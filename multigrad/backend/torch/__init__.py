"""PyTorch.

The native way to bind a custom derivative is a `torch.autograd.Function`: `forward` computes and saves
residuals on `ctx`, `backward` reads them. It deviates here in three things.

- What is saved are the tensors of the rule's closure, and the rule is made anew around them: PyTorch sees
  every residual, and no output stands in a cycle with its node.
- A second derivative goes through what the rule closed over. An input or an output there comes back from
  `ctx.saved_tensors` with its history; for an intermediate the function runs once more on the saved
  inputs, recorded this time, and only when the backward pass is itself being recorded.
- Inside torch.func, forward mode and torch.compile, a Function of the kind that each of them accepts.

A rule runs under the autocast of its function, wherever the backward pass is called, as by
`torch.amp.custom_fwd` and `custom_bwd`: it expects the dtypes that the function met.

Its rooms: `node.py` for eager code, `transforms.py` for torch.func and forward mode, `programs.py` for what
is compiled or written down, `gradients.py` for the calculus; they share `tensors.py` and `state.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling, is_exporting

from multigrad.backend import Call
from multigrad.backend.torch.compiled_function import jit
from multigrad.backend.torch.gradients import (
    gradients_expected,
    jacobian,
    may_record,
    needs_plain_rule,
    unrecorded,
    value_and_grad,
    vjp,
)
from multigrad.backend.torch.host_call import host_call, host_code
from multigrad.backend.torch.node import HasRun, MoreInputs, attach, join_of
from multigrad.backend.torch.programs import apply_compiled, apply_exporting, compiled, uncompiled
from multigrad.backend.torch.state import (
    is_compiling,
    is_functorch_active,
    is_tracing,
    untransformed,
    unwrapped,
    unwrapped_once,
)
from multigrad.backend.torch.tensors import (
    CONVERTIBLE,
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
    snapshot,
    specs_of,
)
from multigrad.backend.torch.transforms import apply_transforming, is_apart
from multigrad.backend.usual import (
    after,
    as_tensor,
    assign,
    is_constant,
    library_code,
    program,
    sizes,
    wide,
)


def apply(call: Call, tensors: Sequence[torch.Tensor], apart: bool = False) -> Any:
    if is_dynamo_compiling():
        return apply_compiled(call, tensors)
    for tensor in tensors:  # in place, as a call would be felt
        if unwrapped_once(tensor) is not tensor:
            tensors = unwrapped(tensors)
            break
    if not apart and (is_functorch_active() or forward_ad._current_level >= 0):
        return _apply_under_transforms(call, tensors)
    if is_exporting() or is_tracing():
        return apply_exporting(call, tensors)
    if is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                try:
                    output = attach(call, *tensors)
                    return join_of(output) if type(output) is tuple else output
                except MoreInputs as more:
                    ran = more.args
                return join_of(attach(*ran))
    return _without_gradient(call, tensors)


def _apply_under_transforms(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    if is_apart(call, tensors):
        with untransformed():
            return apply(call, tensors, apart=True)
    return apply_transforming(call, tensors)


def _without_gradient(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    recorded = is_grad_enabled()
    with torch.no_grad():
        ran = call.run(tensors)
    outputs, _, inputs, back = ran
    if recorded and inputs is not tensors and any([tensor.requires_grad for tensor in inputs]):
        return join_of(attach(HasRun(call, ran), *inputs))
    if recorded:
        # What requires a gradient all the same was closed over, and has none through the rule.
        return back.output.join([o.detach() if o.requires_grad else o for o in outputs])
    # An output that is an input is another tensor here, too: to a rule around this call it is no input.
    return back.output.join([o.view_as(o) if any([o is t for t in inputs]) else o for o in outputs])
