"""The cost of a call of an op, as counts that are equal on every machine.

They are calls of Python functions of the package, and the tensors that PyTorch saves.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from support import BACKEND

import multigrad

PACKAGE = os.path.dirname(multigrad.__file__) + os.sep


def calls(function: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of calls of functions of the package in a function, and the result of the function.

    List comprehensions are calls only in Python 3.11, and are not counted.
    """
    found = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.endswith("comp>"):
            found += 1

    before = sys.getprofile()
    gc.disable()  # it may call finalizers of other objects
    sys.setprofile(profile)
    try:
        returned = function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found, returned


def calls_of(op: Callable[..., Any], arguments: Sequence[Any]) -> tuple[int, int]:
    """Return the numbers of calls in the forward and the backward pass of an op."""
    forward, pull = calls(lambda: _vjp(op, arguments))
    backward, _ = calls(pull)
    return forward, backward


def _vjp(op: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """Return the backward pass of an op from ones, by the framework only."""
    if BACKEND == "jax":
        import jax

        output, pull = jax.vjp(op, *arguments)
        ones = jax.tree.map(jax.numpy.ones_like, output)
        return lambda: pull(ones)
    if BACKEND == "torch":
        import torch

        leaves = [x.detach().clone().requires_grad_() for x in arguments]
        output = op(*leaves)
        outputs = output if type(output) is tuple else (output,)
        ones = [torch.ones_like(o) for o in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, ones)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(arguments)
        output = op(*arguments)
    return lambda: tape.gradient(output, arguments)


def saved(op: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the tensors that PyTorch saves in a call for the backward pass."""
    import torch

    kept: list[Any] = []
    leaves = [x.detach().clone().requires_grad_() for x in arguments]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        op(*leaves)
    return kept
