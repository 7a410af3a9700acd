"""`multigrad.jit` on PyTorch: `torch.compile`, which tracks Python objects and their attributes.

A function is compiled as one graph, which contains its gradients. If Dynamo cannot trace it whole, the call
runs uncompiled. If the next one cannot be traced either, the function is compiled in pieces, with a graph
break at each gradient.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from multigrad.backend.torch.eager import UNRECORDED, refuse
from multigrad.backend.torch.private import TorchDynamoException

_LOGGER = logging.getLogger("multigrad")
_SECONDS = 10.0
"""The time after which a line says what is being compiled."""

_STATE = threading.local()
_WHOLE, _IN_PIECES = "whole", "in pieces"


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    # Functions with the same code, such as all gradient functions, would share a limit of compilations.
    options = {"isolate_recompiles": True, **options}
    whole = torch.compile(function, **{**options, "fullgraph": True})
    pieces = torch.compile(function, **options)
    failures, has_run = 0, False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures, has_run
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = vars(_STATE).copy()
        _STATE.unrecorded = False
        _STATE.differentiated = torch.is_grad_enabled() and _requires_gradient((args, kwargs))
        try:
            with contextlib.nullcontext() if has_run else _announced(name):
                if failures < 2:
                    _STATE.mode = _WHOLE
                    try:
                        result = whole(*args, **kwargs)
                        has_run = True
                        return _refusing_derivatives(result) if _STATE.unrecorded else result
                    except TorchDynamoException:  # raised before the function runs
                        if options.get("fullgraph"):
                            raise
                        failures += 1
                if (
                    failures < 2
                ):  # it may make layers and optimizers in its first call, and compile in the next
                    _STATE.mode = ""
                    return function(*args, **kwargs)
                _STATE.mode = _IN_PIECES
                result = pieces(*args, **kwargs)
                has_run = True
                return result
        finally:
            vars(_STATE).clear()
            vars(_STATE).update(before)

    return run


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    """Log a line if the code takes long, because it compiles a function."""
    text = (
        "multigrad.jit: compiling %s takes more than %g s. Later calls with the same shapes do not compile."
    )
    timer = threading.Timer(_SECONDS, _LOGGER.warning, [text, name, _SECONDS])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _requires_gradient(arguments: Any) -> bool:
    leaves = pytree.tree_leaves(arguments)
    return any([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves])


def note_unrecorded() -> None:
    """Note that the program takes a gradient with respect to weights that it does not record."""
    _STATE.unrecorded = True


def _refusing_derivatives(result: Any) -> Any:
    """Return the result of a program, so that differentiating it raises an error."""

    def refused(leaf: Any) -> Any:
        requires = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return refuse(leaf, UNRECORDED) if requires else leaf

    return pytree.tree_map(refused, result)


def is_whole() -> bool:
    """Return whether `multigrad.jit` compiles this code as one graph."""
    return getattr(_STATE, "mode", "") == _WHOLE


def is_in_pieces() -> bool:
    """Return whether `multigrad.jit` compiles this code with a graph break at each gradient."""
    return getattr(_STATE, "mode", "") == _IN_PIECES


def is_differentiated_outside() -> bool:
    """Return whether an argument of the function that is compiled requires a gradient."""
    return getattr(_STATE, "differentiated", False)
