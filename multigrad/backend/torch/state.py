"""What PyTorch is doing at this place of the program: transforming, tracing, compiling, casting."""

import contextlib
from collections.abc import Iterator, Sequence
from operator import is_not
from typing import Any

import torch
from torch.autograd import forward_ad

# Whether a program is traced, and whether torch.func is at work. These are private, as is the state of
# tracing: the public ways to ask (PyTorch 2.13) cost several times as much, or do not exist.
is_tracing = torch._C._is_tracing
is_functorch_active = torch._C._are_functorch_transforms_active


def is_transforming() -> bool:
    """Whether torch.func or forward mode is at work, for which a Function must be of another kind.

    The kind that serves all costs twice as much.
    """
    return is_functorch_active() or forward_ad._current_level >= 0


# Private: PyTorch (2.13) has no public way to apply a Function of one level in the midst of a transform that
# it has nothing to do with.
untransformed = torch._functorch.utils.enable_single_level_autograd_function
# Nor one to ask for the hooks that are called with what is saved, as a checkpoint's are.
hooks_of_saving = torch._C._autograd._top_saved_tensors_default_hooks
# Nor one for what stands in the wrapper of a transform that has ended.
unwrapped_once = torch._C._functorch.unwrap_if_dead
# Nor one to ask which transforms are at work, and which of them a tensor is wrapped for.
_transforms = torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters
_level, _axis = torch._C._functorch.maybe_get_level, torch._C._functorch.maybe_get_bdim
_VMAP = torch._C._functorch.TransformType.Vmap


def unwrapped(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, and for those that transforms which have ended wrapped, what stands within.

    Such are met where the function that `torch.func.vjp` returns is called: a wrapper has no history there.
    """
    while any(map(is_not, map(unwrapped_once, tensors), tensors)):
        tensors = [*map(unwrapped_once, tensors)]
    return tensors


def batches() -> set[tuple[int, int]]:
    """The vmaps that are at work: the level of each, and its elements."""
    return {(t.level(), t.batch_size()) for t in _transforms() if t.key() == _VMAP}


def mappings(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The vmaps, within one another, by which a tensor is mapped: the level of each, and its elements."""
    return [(level, count) for level, count, _ in _mapped(tensor)]


def _mapped(tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """The same, with the axis that stands within for each."""
    while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
        if inner.ndim > tensor.ndim:
            axis = _axis(tensor)
            yield _level(tensor), inner.shape[axis], axis
        tensor = inner


# Nor one to compute with what stands in wrapped tensors, past all transforms and what writes operations down.
_past_modes = torch.utils._python_dispatch._disable_current_modes
# Nor one to ask whether a tensor is fake.
_is_fake = torch._subclasses.fake_tensor.is_fake


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, and nothing is computed with it."""
    return tensor.is_meta or _is_fake(tensor)


# Nor one to ask whether it stands for a batch of the vmap before torch.func, by which PyTorch (2.13) takes
# `is_grads_batched` and which has no way to compare numbers.
_is_of_old_vmap = torch._C._functorch.is_legacy_batchedtensor


def is_unreadable(tensor: torch.Tensor) -> bool:
    """Whether its values cannot be compared with others."""
    return is_empty(tensor) or _is_of_old_vmap(tensor)


def is_of_level_within(tensor: torch.Tensor) -> bool:
    """Whether it is wrapped for a transform within those that are at work here.

    In forward mode a vmap from within may be at work in the place of the transform around it.
    """
    at_work = {transform.level(): transform.key() == _VMAP for transform in _transforms()}
    while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
        level = _level(tensor)  # that of one that has ended is negative
        if level > 0 and at_work.get(level) != (inner.ndim > tensor.ndim):
            return True
        tensor = inner
    return False


@contextlib.contextmanager
def past_transforms() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), _past_modes():
        yield


def bare(tensor: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """What stands in a wrapped tensor, behind one axis for each of these levels of vmap that map it or not.

    To be computed with `past_transforms`.
    """
    axes = [(1, axis) for axis in range(tensor.ndim)]
    for level, _, axis in _mapped(tensor):
        axes.insert(axis, (0, levels.index(level)))
    whole = torch.func.debug_unwrap(tensor, recurse=True).detach()
    whole = whole.permute([axes.index(axis) for axis in sorted(axes)])
    for place in range(len(levels)):
        if (0, place) not in axes:
            whole = whole.unsqueeze(place)
    return whole


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Nothing that is done here is written down by a trace. Private: PyTorch (2.13) has no public way."""
    writing = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(writing)


def is_compiling() -> bool:
    return torch.compiler.is_compiling()


Autocast = tuple[torch.dtype | None, torch.dtype | None] | None
"""To which dtype autocast casts on the CPU and on the accelerator, None where it does not."""

_ACCELERATOR = torch.accelerator.current_accelerator()

# Private: the public way (PyTorch 2.13) asks for one device at a time, at twice the cost.
is_autocast_anywhere = torch._C._is_any_autocast_enabled


def autocast_here() -> Autocast:
    """The autocast of this place in the program."""
    if not is_autocast_anywhere():
        return None
    cpu = _dtype_on("cpu")
    other = cpu if _ACCELERATOR is None else _dtype_on(_ACCELERATOR.type)
    return (cpu, other) if cpu or other else None


def _dtype_on(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocasting(autocast: Autocast) -> contextlib.AbstractContextManager[Any]:
    """The autocast of another place, here."""
    cpu, other = autocast or (None, None)
    on_cpu = torch.autocast("cpu", dtype=cpu, enabled=cpu is not None)
    if _ACCELERATOR is None:
        return on_cpu
    return _both(on_cpu, torch.autocast(_ACCELERATOR.type, dtype=other, enabled=other is not None))


@contextlib.contextmanager
def _both(first: torch.autocast, second: torch.autocast) -> Iterator[None]:
    with first, second:
        yield


def drawing_apart() -> contextlib.AbstractContextManager[None]:
    """What is drawn here at random is drawn again behind it."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
