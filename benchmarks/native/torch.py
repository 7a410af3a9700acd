"""PyTorch: a `torch.autograd.Function`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import tree


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The native op of `forward(*tensors) -> outputs, residuals` and `backward(residuals, *upstream)`."""

    class Native(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            outputs, residuals = forward(*tensors)
            ctx.save_for_backward(*residuals)
            return outputs

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            return backward(ctx.saved_tensors, *upstream)

    return Native.apply


ANEW = False
"""Whether an op by hand is defined anew in a layer's call. A Function is a class, made once."""


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(array, requires_grad=True)


def constant(array: Any) -> torch.Tensor:
    """A tensor that nobody differentiates by."""
    return torch.tensor(array)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """A run of `f(*args)`, forward and backward."""
    leaves = tree.flatten(list(args))
    outputs = _flat(f(*args))
    ones = [torch.ones_like(output) for output in outputs]

    def run() -> Any:
        return torch.autograd.grad(_flat(f(*args)), leaves, ones)

    return run


def _flat(output: Any) -> Sequence[torch.Tensor]:
    return (output,) if isinstance(output, torch.Tensor) else output


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """The same, compiled. "aot_eager" generates no code: what is measured is the program's graph."""
    torch.compiler.reset()
    return runner(torch.compile(f, backend="aot_eager", fullgraph=True), args)


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Make the program of a run anew."""
    compiled(f, args)


def wait(result: Any) -> None:
    """Until the numbers are there."""


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a forward pass leaves for the backward pass, and keeps alive."""
    return f(*args)


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """The derivative of this order of an elementwise function, forward pass and all."""

    def run(x: Any) -> Any:
        y = f(x)
        for place in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=place < order - 1)
        return y

    return run


def linear_cross_entropy(features: torch.Tensor, kernel: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """PyTorch's own (2.13) in chunks, by its own choice of them: the mean over the tokens."""
    options = torch.nn.LinearCrossEntropyOptions()
    return torch.nn.functional.linear_cross_entropy(features, kernel, labels.long(), options=options)


def rows_for_classes(kernel: torch.Tensor) -> torch.Tensor:
    """The kernel as PyTorch has it."""
    return kernel.T.contiguous()
