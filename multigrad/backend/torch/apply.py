"""One call of an op on PyTorch: eager, under a transform of torch.func, or compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling, is_exporting

from multigrad.backend.base import Call
from multigrad.backend.torch.compiled import apply_compiled, apply_exporting
from multigrad.backend.torch.eager import tie
from multigrad.backend.torch.functorch import apply_transforming, is_unaffected
from multigrad.backend.torch.private import (
    forward_level,
    is_functorch_active,
    is_tracing,
    set_grad_enabled,
    skip_frames,
    untransformed,
    unwrapped_once,
)
from multigrad.backend.torch.state import unwrap_ended


@skip_frames
def apply(call: Call, tensors: Sequence[torch.Tensor], unaffected: bool = False) -> Any:
    if is_dynamo_compiling():
        return apply_compiled(call, tensors)
    for tensor in tensors:  # inlined: a function call here costs 1 us per op
        if unwrapped_once(tensor) is not tensor:
            tensors = unwrap_ended(tensors)
            break
    if not unaffected and (is_functorch_active() or forward_level() >= 0):
        return _apply_under_transforms(call, tensors)
    if is_exporting() or is_tracing():
        return apply_exporting(call, tensors)
    recording = is_grad_enabled()
    set_grad_enabled(False)
    try:
        run = call.run(tensors)
    finally:
        set_grad_enabled(recording)
    outputs = run.outputs
    if not recording:
        # An output that is an input is copied as a view. The rule of an outer op would take it for the outer
        # input.
        outputs = [o.view_as(o) if any([o is t for t in run.inputs]) else o for o in outputs]
        return run.pullback.output.join(outputs)
    for tensor in run.inputs:
        if tensor.requires_grad:
            return run.pullback.output.join(tie(call, run))
    # An output that requires a gradient is a tensor that the function closes over. The op has none for it.
    return run.pullback.output.join([o.detach() if o.requires_grad else o for o in outputs])


def _apply_under_transforms(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    if is_unaffected(call, tensors):
        with untransformed():
            return apply(call, tensors, unaffected=True)
    return apply_transforming(call, tensors)
