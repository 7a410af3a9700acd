"""Derivatives in a graph of `multigrad.jit`, which is the whole program or a piece of it.

Dynamo traces the function. The functions here that are allowed in the graph run later, when AOTAutograd
traces the graph. There the tensors have their history, and `torch.autograd.grad` becomes part of the program.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from multigrad.backend.torch import private
from multigrad.backend.torch.state import IN_THREAD


def value_and_grad(
    function: Callable[..., tuple[torch.Tensor, Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any],
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    recorded = torch.is_grad_enabled() and (not variables or is_differentiated())
    if torch.is_grad_enabled() and not recorded:  # a training step, which would pay for the history
        IN_THREAD.has_unrecorded_gradient = True
    with torch.enable_grad(), _count_derivative(recorded):
        inputs = _new_inputs(list(tensors))
        value, aux = function(*inputs)
    if not inputs:
        return (value if recorded else value.detach(), aux), []
    value, *gradients = _gradients(value, inputs, recorded, value.requires_grad)
    return (value, aux), gradients


def is_differentiated() -> bool:
    """Return whether a derivative that is taken here is differentiated again, as far as Dynamo sees.

    AOTAutograd does not see it: to find the outputs, it also traces the graph with weights that require no
    gradient.
    """
    return IN_THREAD.depth > 0 or IN_THREAD.in_rule or IN_THREAD.is_differentiated


def vjp(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]:
    with torch.enable_grad(), _count_derivative(True):
        inputs = _new_inputs(list(tensors))
        recorded, aux = function(*inputs)
    recorded = list(recorded)
    requiring = [output.requires_grad for output in recorded]
    outputs = _copy_outputs(recorded, torch.is_grad_enabled())

    def pullback(upstream: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not inputs:
            return []
        return _pull(recorded, inputs, list(upstream), torch.is_grad_enabled(), requiring)

    return (outputs, aux), pullback


@contextlib.contextmanager
def _count_derivative(recorded: bool) -> Iterator[None]:
    """Count a derivative, except in a rule, where Dynamo changes no state from outside.

    `recorded` says whether the gradients may be differentiated again.
    """
    if IN_THREAD.in_rule:
        yield
        return
    depth, before = IN_THREAD.depth, IN_THREAD.keeps_history
    IN_THREAD.depth, IN_THREAD.keeps_history = depth + 1, recorded
    try:
        yield
    finally:
        IN_THREAD.depth, IN_THREAD.keeps_history = depth, before


@torch.compiler.allow_in_graph
def _new_inputs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensors with respect to which a derivative is taken. A tensor with a history keeps it."""
    with torch.enable_grad():
        new = [t.clone() if t.requires_grad else t.detach().clone().requires_grad_() for t in tensors]
    for tensor in new:
        # It does not pass from one graph to another. Without `skip_frame`, a graph can break in a derivative.
        tensor.multigrad_traced = True
    return new


@torch.compiler.allow_in_graph
def _gradients(
    value: torch.Tensor, inputs: list[torch.Tensor], recorded: bool, depends: bool
) -> list[torch.Tensor]:
    """Return the value and its gradients."""
    _require_as_traced([value], [depends])
    gradients = _derivative([value], inputs, [torch.ones_like(value)], recorded)
    return [value.clone() if recorded else value.detach().clone(), *gradients]


@torch.compiler.allow_in_graph
def _copy_outputs(outputs: list[torch.Tensor], recording: bool) -> list[torch.Tensor]:
    return [output.clone() if recording else output.detach().clone() for output in outputs]


@torch.compiler.allow_in_graph
def _pull(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    upstream: list[torch.Tensor],
    recorded: bool,
    requiring: list[bool],
) -> list[torch.Tensor]:
    """Return the gradients of the inputs."""
    _require_as_traced(outputs, requiring)
    return _derivative(outputs, inputs, upstream, recorded)


def _derivative(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], upstream: list[torch.Tensor], recorded: bool
) -> list[torch.Tensor]:
    if not all([hasattr(tensor, "multigrad_traced") for tensor in inputs]):
        raise AssertionError("the graph was broken inside of a derivative, which would be zero")
    pairs = [(output, u) for output, u in zip(outputs, upstream, strict=True) if output.requires_grad]
    if not pairs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    with _unknown_sizes(outputs[0]):
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [u for _, u in pairs],
            retain_graph=True,
            create_graph=recorded,
            materialize_grads=True,
        )
    return list(gradients) if recorded else [gradient.detach() for gradient in gradients]


def _require_as_traced(outputs: list[torch.Tensor], requiring: list[bool]) -> None:
    """Raise if a tensor lost its history, whose gradient would be zero."""
    if [output.requires_grad for output in outputs] != requiring:
        raise AssertionError("a tensor of the program has another history than when Dynamo traced it")


def _unknown_sizes(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a gradient may have sizes that depend on data."""
    mode = private.fake_mode_of(tensor)
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()
