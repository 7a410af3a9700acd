"""One call of an op on PyTorch: eager, under a transform of torch.func, or compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling, is_exporting

from multigrad.backend.base import Call
from multigrad.backend.torch.compiled import apply_compiled, apply_exporting
from multigrad.backend.torch.eager import HasRun, MoreInputs, attach, join_attached
from multigrad.backend.torch.functorch import apply_transforming, is_unaffected
from multigrad.backend.torch.private import (
    forward_ad,
    is_functorch_active,
    is_tracing,
    untransformed,
    unwrapped_once,
)
from multigrad.backend.torch.state import unwrapped


def apply(call: Call, tensors: Sequence[torch.Tensor], unaffected: bool = False) -> Any:
    if is_dynamo_compiling():
        return apply_compiled(call, tensors)
    for tensor in tensors:  # inlined: a function call here costs 1 us per op
        if unwrapped_once(tensor) is not tensor:
            tensors = unwrapped(tensors)
            break
    if not unaffected and (is_functorch_active() or forward_ad._current_level >= 0):
        return _apply_under_transforms(call, tensors)
    if is_exporting() or is_tracing():
        return apply_exporting(call, tensors)
    if is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                try:
                    output = attach(call, *tensors)
                    return join_attached(output) if type(output) is tuple else output
                except MoreInputs as more:
                    ran = more.args
                return join_attached(attach(*ran))
    return _without_gradient(call, tensors)


def _apply_under_transforms(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    if is_unaffected(call, tensors):
        with untransformed():
            return apply(call, tensors, unaffected=True)
    return apply_transforming(call, tensors)


def _without_gradient(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    recorded = is_grad_enabled()
    with torch.no_grad():
        run = call.run(tensors)
    outputs, inputs, pullback = run.outputs, run.inputs, run.pullback
    if recorded and inputs is not tensors and any([tensor.requires_grad for tensor in inputs]):
        return join_attached(attach(HasRun(call, run), *inputs))
    if recorded:
        # An output that requires a gradient is a tensor that the function closes over. The op has none for
        # it.
        return pullback.output.join([o.detach() if o.requires_grad else o for o in outputs])
    # An output that is an input is copied as a view. The rule of an outer op would take it for the outer
    # input.
    return pullback.output.join([o.view_as(o) if any([o is t for t in inputs]) else o for o in outputs])
