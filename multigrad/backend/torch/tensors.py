"""The tensors of PyTorch: types, dtypes, values and conversions."""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from multigrad.backend.base import F, Operation, Spec
from multigrad.backend.torch import private
from multigrad.backend.torch.state import is_compiling, is_transforming
from multigrad.common.errors import message
from multigrad.common.reachable import assigned_cells
from multigrad.common.type_sets import ForeignArrays, TypeSet

TENSORS = TypeSet(torch.Tensor)
FOREIGN = ForeignArrays(torch.Tensor)
STAND_INS = TypeSet(torch.fx.Proxy)


def constant(function: F) -> F:
    """Mark a function that Dynamo calls instead of tracing it."""
    return torch.compiler.assume_constant_result(function)


constant(assigned_cells)  # Dynamo (PyTorch 2.13 to 2.15) cannot guard its cache, whose keys are code


def update_wrapper(wrapper: F, wrapped: Callable[..., Any]) -> F:
    """Give the wrapper of a function a code object of its own.

    Dynamo keeps the compiled programs of a function with its code, and silently compiles no more after eight
    of them. Wrappers would share this limit.
    """
    if isinstance(wrapped, types.FunctionType) and not torch.compiler.is_dynamo_compiling():
        wrapper.__code__ = _code_for(wrapper.__code__, wrapped.__code__)
    functools.update_wrapper(wrapper, wrapped)
    return wrapper


@functools.lru_cache(maxsize=1024)
def _code_for(code: types.CodeType, wrapped: types.CodeType) -> types.CodeType:
    """Return a copy of the code, the same one for functions that are defined again and again."""
    return code.replace()


def changed_upstream(name: str) -> RuntimeError:
    """Return the error for a rule that changed its upstream gradient, which other operations use, too."""
    return RuntimeError(
        message(
            name,
            "the rule changed its upstream gradient in place",
            required="a rule that leaves the upstream gradient unchanged, which other operations use, too",
            got="a change in place, such as upstream.mul_(2.0)",
            fix="use the out-of-place operation, such as upstream * 2.0",
            see="limits#in-place",
        )
    )


is_reading_code = torch.compiler.is_dynamo_compiling


def defaults_of(function: types.FunctionType) -> int:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if torch.compiler.is_dynamo_compiling() and len(names) > 1 and names[-1] in ("upstream", "variables"):
        # Dynamo (PyTorch 2.13) cannot read constant defaults. Whether `upstream` has one makes no difference.
        # A rule with `variables` gets a list in each call, as if it had none.
        return int(names[-1] == "upstream")
    return len(function.__defaults__ or ())


# Whether each dtype is differentiable. A dict lookup takes less time than two attributes of the dtype.
FLOATING = {
    dtype: dtype.is_floating_point or dtype.is_complex
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors with an alias for each repeated one, so that each input has an object of its own.

    Under a transform, two inputs may be wrappers of one tensor, and a residual must be known by the position
    of its input. Dynamo (PyTorch 2.13) does not accept a repeated argument of a Function.
    """
    aliased: list[torch.Tensor] = []
    for tensor in tensors:
        for other in aliased:
            if tensor is other:
                tensor = tensor.view_as(tensor)
                break
        aliased.append(tensor)
    return aliased


def is_differentiable(tensor: torch.Tensor) -> bool:
    return FLOATING[tensor.dtype]


def specs_of(tensors: Sequence[torch.Tensor]) -> list[Spec | None]:
    specs: list[Spec | None] = []
    for tensor in tensors:  # not a comprehension, which is a function call
        dtype = tensor.dtype
        specs.append((tensor.shape, dtype, tensor.device) if FLOATING[dtype] else None)
    return specs


def conform(gradient: torch.Tensor, spec: Spec) -> torch.Tensor:
    shape, dtype, device = spec
    if gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype.is_complex and not dtype.is_complex:
        gradient = gradient.real
    return gradient.to(device, dtype)


def concrete(tensor: torch.Tensor) -> np.ndarray | None:
    if is_transforming() or torch.compiler.is_compiling():
        return None
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64  # NumPy has no bfloat16
    resolved = tensor.detach().resolve_conj().resolve_neg()  # NumPy has no lazy conjugates and negatives
    return resolved.to("cpu", wide if FLOATING[tensor.dtype] else None).numpy()


def observe(callback: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
    if not (is_compiling() or private.is_tracing() or any([tensor.is_meta for tensor in tensors])):
        callback(*map(_value, tensors))


@torch.compiler.disable(reason="a program cannot call the host; compile without fullgraph")
def watch(callback: Callable[..., None], tensor: torch.Tensor) -> torch.Tensor:
    observe(callback, [tensor])
    return tensor


def _value(tensor: torch.Tensor) -> np.ndarray:
    if not is_transforming():
        return np.array(keras.ops.convert_to_numpy(tensor.resolve_conj().resolve_neg()))
    # Under a transform every operation wraps its result. `tolist` is not an operation.
    values = torch.func.debug_unwrap(tensor, recurse=True).tolist()
    return np.array(values, keras.backend.standardize_dtype(tensor.dtype))


class _Operations(private.TorchDispatchMode):
    """Records the dtypes of each operation, also in backward passes. Compiled functions run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Operation] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.found.add((_dtypes_in((args, kwargs)), _dtypes_in(results)))
        return results


def _dtypes_in(structure: Any) -> tuple[str, ...]:
    leaves = private.tree_leaves(structure)
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)


def operations(
    function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
) -> set[Operation]:
    with _Operations() as recorded:
        function(*tensors)
    return recorded.found
