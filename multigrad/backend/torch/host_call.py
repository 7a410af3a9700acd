"""`host_call` on PyTorch: the function gets NumPy arrays, outside of compiled and transformed code."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import ml_dtypes
import numpy as np
import torch

from multigrad.backend.base import F, HostFunction, TensorSpec
from multigrad.backend.torch import private
from multigrad.backend.torch.state import is_empty


def opaque_to_compiler(function: F) -> F:
    reason = "a program cannot call the host, or repeat a step until it converges; compile without fullgraph"
    return cast(F, torch.compiler.disable(function, reason=reason))


def host_call(
    function: HostFunction, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], vectorized: bool
) -> list[torch.Tensor]:
    if private.is_functorch_active():
        return list(_Transformed.apply(function, specs, vectorized, *tensors))
    return _call(function, tensors, specs)


def _call(
    function: HostFunction, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]
) -> list[torch.Tensor]:
    if any(is_empty(tensor) for tensor in tensors):  # where Keras asks for shapes
        device = tensors[0].device
        return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in specs]
    device = tensors[0].device if tensors else None
    arrays = function([_as_array(tensor) for tensor in tensors])
    return [_as_tensor(array, device) for array in arrays]


class _Transformed(torch.autograd.Function):
    """The call in torch.func, which maps it by `vmap`."""

    @staticmethod
    def forward(
        function: HostFunction, specs: Sequence[TensorSpec], vectorized: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(_call(function, tensors, specs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[None, ...]:
        raise AssertionError("the op around it has the rule")

    @staticmethod
    def vmap(
        info: Any,
        axes: Sequence[Any],
        function: HostFunction,
        specs: Sequence[TensorSpec],
        vectorized: bool,
        *tensors: torch.Tensor,
    ) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
        batched = [
            tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip(tensors, axes[3:], strict=True)
        ]
        if vectorized:
            specs = [((info.batch_size, *shape), dtype) for shape, dtype in specs]
            results = _Transformed.apply(function, specs, vectorized, *batched)
        else:
            rows = zip(*[tensor.unbind(0) for tensor in batched], strict=True)
            calls = [_Transformed.apply(function, specs, vectorized, *row) for row in rows]
            results = tuple(torch.stack(column) for column in zip(*calls, strict=True))
        return results, (0,) * len(results)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:  # NumPy needs `ml_dtypes` for it
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _as_tensor(array: np.ndarray, device: torch.device | None) -> torch.Tensor:
    if device is None:
        return keras.ops.convert_to_tensor(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)
