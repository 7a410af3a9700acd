"""`multigrad.jit` on PyTorch: `torch.compile`, which tracks Python objects and their attributes."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

_IN_PIECES = threading.local()


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    compiled = torch.compile(function, **options)
    if options.get("fullgraph"):
        return compiled

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        before = is_in_pieces()
        _IN_PIECES.value = True
        try:
            return compiled(*args, **kwargs)
        finally:
            _IN_PIECES.value = before

    return run


def is_in_pieces() -> bool:
    """Return whether `multigrad.jit` compiles this code, with graph breaks where PyTorch wants them."""
    return getattr(_IN_PIECES, "value", False)
