"""The state of PyTorch: active transforms, tracing, compilation and autocast."""

import contextlib
import threading
from collections.abc import Hashable, Iterator, Sequence
from operator import is_not
from typing import Any

import torch

from multigrad.backend.torch import private


def is_transforming() -> bool:
    """Return whether torch.func or forward mode is active, which require another form of a Function.

    This form takes twice as long, so it is not used elsewhere.
    """
    return private.is_functorch_active() or private.forward_level() >= 0


def unwrap_ended(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the tensors without wrappers of transforms that have ended.

    They occur when a function that `torch.func.vjp` returned is called. The wrappers have no history.
    """
    while any(map(is_not, map(private.unwrapped_once, tensors), tensors)):
        tensors = [*map(private.unwrapped_once, tensors)]
    return tensors


def active_vmaps() -> set[tuple[int, int]]:
    """Return the level and the batch size of each active vmap."""
    return {(t.level(), t.batch_size()) for t in private.transforms() if t.key() == private.VMAP}


def vmaps_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the level and the batch size of each vmap that maps a tensor."""
    return [(level, count) for level, count, _ in _mapped_axes(tensor)]


def _mapped_axes(tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the level, the batch size and the axis of each vmap that maps a tensor."""
    while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
        if inner.ndim > tensor.ndim:
            axis = private.axis_of(tensor)
            yield private.level_of(tensor), inner.shape[axis], axis
        tensor = inner


def is_empty(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values, because it is a meta or fake tensor."""
    return tensor.is_meta or private.is_fake(tensor)


def is_unreadable(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor cannot be compared."""
    return is_empty(tensor) or private.is_of_old_vmap(tensor)


def is_of_ended_transform(tensor: torch.Tensor) -> bool:
    """Return whether a transform that has ended wraps a tensor, as in a pullback of `torch.func.vjp`."""
    while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
        if private.level_of(tensor) < 0:
            return True
        tensor = inner
    return False


@contextlib.contextmanager
def no_transforms() -> Iterator[None]:
    """Disable all transforms and modes, to compute with the tensors in wrappers."""
    with private.disable_transforms(), private.disable_modes():
        yield


def without_wrappers(tensor: torch.Tensor, levels: Sequence[int]) -> torch.Tensor:
    """Return the tensor in the wrappers, with one leading axis for each of these levels of vmap.

    The axis of a level that does not map the tensor has size 1. To be called in `no_transforms`.
    """
    axes = [(1, axis) for axis in range(tensor.ndim)]
    for level, _, axis in _mapped_axes(tensor):
        axes.insert(axis, (0, levels.index(level)))
    inner = torch.func.debug_unwrap(tensor, recurse=True).detach()
    inner = inner.permute([axes.index(axis) for axis in sorted(axes)])
    for index in range(len(levels)):
        if (0, index) not in axes:
            inner = inner.unsqueeze(index)
    return inner


@contextlib.contextmanager
def hide_from_trace() -> Iterator[None]:
    """Hide operations from `torch.jit.trace`."""
    state = private.get_tracing_state()
    private.set_tracing_state(None)
    try:
        yield
    finally:
        private.set_tracing_state(state)


class _InThread(threading.local):
    """What a thread is doing. Each thread starts with these attributes.

    An attribute that appears later would be a change of state to Dynamo, which would compile a program again.
    """

    def __init__(self) -> None:
        self.depth = 0
        """The number of nested calls of `value_and_grad` and `vjp` in which the code runs."""
        self.keeps_history = False
        """Whether an op in a graph keeps the history that second derivatives need."""
        self.in_rule = False
        """Whether Dynamo traces a rule, in which it changes no state from outside of the rule."""
        self.mode = ""
        """How `multigrad.jit` compiles the code: `WHOLE`, `IN_PIECES`, or not at all."""
        self.is_differentiated = False
        """Whether an argument of the function that `multigrad.jit` compiles requires a gradient."""
        self.has_unrecorded_gradient = False
        """Whether its graph has a gradient with respect to variables that it does not record."""


IN_THREAD = _InThread()


@contextlib.contextmanager
def outermost_derivative() -> Iterator[None]:
    """Treat a gradient in the function of an op as an outermost one: the function is not differentiated."""
    depth, IN_THREAD.depth = IN_THREAD.depth, 0
    try:
        yield
    finally:
        IN_THREAD.depth = depth


WHOLE, IN_PIECES = "whole", "in pieces"
"""The modes of `multigrad.jit`: as one graph, and with graph breaks."""


def is_compiling() -> bool:
    # A new function. Where Dynamo (PyTorch 2.13) reads PyTorch's own from the backend, it evaluates to False.
    return torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def is_transforming_traced() -> bool:
    """Return whether a transform is active around the code that Dynamo traces."""
    return is_transforming()


Autocast = tuple[torch.dtype | None, torch.dtype | None] | None
"""The dtypes to which autocast casts on the CPU and on the accelerator, None if it is disabled."""

_ACCELERATOR = torch.accelerator.current_accelerator()


def current_autocast() -> Autocast:
    """Return the active autocast settings."""
    if not private.is_autocast_anywhere():
        return None
    cpu = _dtype_on("cpu")
    other = cpu if _ACCELERATOR is None else _dtype_on(_ACCELERATOR.type)
    return (cpu, other) if cpu or other else None


def _dtype_on(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def restore_autocast(autocast: Autocast) -> contextlib.AbstractContextManager[Any]:
    """Return a context with these autocast settings."""
    cpu, other = autocast or (None, None)
    on_cpu = torch.autocast("cpu", dtype=cpu, enabled=cpu is not None)
    if _ACCELERATOR is None:
        return on_cpu
    return _both(on_cpu, torch.autocast(_ACCELERATOR.type, dtype=other, enabled=other is not None))


@contextlib.contextmanager
def _both(first: torch.autocast, second: torch.autocast) -> Iterator[None]:
    with first, second:
        yield


# PyTorch (2.13) holds the mutex of a generator while it makes the tensor of the generator's state. If Python
# collects garbage there, the thread gives up the GIL, and one that waits for the mutex has it: a deadlock.
_RANDOM_STATE = threading.Lock()


@contextlib.contextmanager
def fork_random_state() -> Iterator[None]:
    """Restore the state of random number generators at the end."""
    fork = torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
    with _RANDOM_STATE:
        fork.__enter__()
    try:
        yield
    finally:
        with _RANDOM_STATE:
            fork.__exit__(None, None, None)


def trace_level() -> Hashable:
    return is_transforming()  # a training step is not in a transform
