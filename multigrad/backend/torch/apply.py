"""One call of an op on PyTorch: eager, under a transform of torch.func, or compiled."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from multigrad.backend.base import Call
from multigrad.backend.torch import private
from multigrad.backend.torch.compiled import apply_compiled, apply_exporting
from multigrad.backend.torch.eager import apply_eagerly
from multigrad.backend.torch.functorch import apply_transforming, is_unaffected
from multigrad.backend.torch.state import unwrap_ended


@private.skip_frames
def apply(call: Call, tensors: Sequence[torch.Tensor], unaffected: bool = False) -> Sequence[Any]:
    if is_dynamo_compiling():
        return apply_compiled(call, tensors)
    for tensor in tensors:  # inlined: a function call here costs 1 us per op
        if private.unwrapped_once(tensor) is not tensor:
            tensors = unwrap_ended(tensors)
            break
    if not unaffected and (private.is_functorch_active() or private.forward_level() >= 0):
        return _apply_under_transforms(call, tensors)
    if is_exporting() or private.is_tracing():
        return apply_exporting(call, tensors)
    return apply_eagerly(call, tensors)


def _apply_under_transforms(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    if is_unaffected(call, tensors):
        with private.untransformed():
            return apply(call, tensors, unaffected=True)
    return apply_transforming(call, tensors)
