"""PyTorch: `torch.autograd.Function`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops, tree

VERSION = f"PyTorch {torch.__version__}"
DEVICE = ops.zeros(()).device  # where Keras puts its tensors


def bind(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op.

    `forward(*tensors)` returns outputs and residuals. `backward(residuals, *upstream)` returns gradients.
    """

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


DEFINES_IN_EACH_CALL = False
"""Whether PyTorch code usually defines an op in a layer's call. A Function is a class at module level."""


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(array, device=DEVICE, requires_grad=True)


def constant(array: Any) -> torch.Tensor:
    """Return a tensor that is a constant in derivatives."""
    return torch.tensor(array, device=DEVICE)


def runner(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward."""
    leaves = tree.flatten(list(args))
    outputs = _flat(f(*args))
    ones = [torch.ones_like(output) for output in outputs]

    def run() -> Any:
        return torch.autograd.grad(_flat(f(*args)), leaves, ones)

    return run


def _flat(output: Any) -> Sequence[torch.Tensor]:
    return (output,) if isinstance(output, torch.Tensor) else output


def compiled(f: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any]:
    """Return a function that runs `f(*args)` forward and backward, compiled by `torch.compile`.

    "aot_eager" generates no code, so this measures the graph and not a code generator.
    """
    torch.compiler.reset()
    return runner(torch.compile(f, backend="aot_eager", fullgraph=True), args)


def trace(f: Callable[..., Any], args: Sequence[Any]) -> None:
    """Trace the forward and backward pass again."""
    compiled(f, args)


def wait(result: Any) -> None:
    """Wait until a result is computed."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forward(f: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run the forward pass, and return what keeps its residuals alive."""
    return f(*args)


def derivative(f: Callable[..., Any], order: int) -> Callable[[Any], Any]:
    """Return the derivative of an elementwise function, of this order, including its forward pass."""

    def run(x: Any) -> Any:
        y = f(x)
        for i in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=i < order - 1)
        return y

    return run


def linear_cross_entropy(features: torch.Tensor, kernel: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of PyTorch's chunked implementation (2.13), with its default options."""
    options = torch.nn.LinearCrossEntropyOptions()
    return torch.nn.functional.linear_cross_entropy(features, kernel, labels.long(), options=options)


def rows_for_classes(kernel: torch.Tensor) -> torch.Tensor:
    """Return a kernel in the layout of PyTorch, with one row per class."""
    return kernel.T.contiguous()


def launches(step: Callable[[], Any]) -> int:
    """Return the number of operations that PyTorch launches in a step, without views and allocations."""
    free = ("aten::as_strided", "aten::empty", "aten::view", "aten::transpose", "aten::slice", "aten::select")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [event.name for event in profile.events() if event.name.startswith("aten::")]
    return sum(not name.startswith(free) for name in names)


class _GpuMemory:
    def start(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def gpu_memory() -> _GpuMemory | None:
    """Return the memory of the GPU, None without a GPU."""
    return _GpuMemory() if torch.cuda.is_available() else None


def accelerator() -> str | None:
    """Return the name of the accelerator, None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def allocated() -> int | None:
    """Return the bytes of the tensors on the accelerator, None without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def bind_both_modes(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an elementwise op for torch.func, of the functions that `bind` takes."""

    class Native(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Any) -> Any:
            return forward(x)[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return backward(ctx.saved_tensors, upstream)

        @staticmethod
        def jvp(ctx: Any, tangent: Any) -> Any:
            return backward(ctx.saved_tensors, tangent)

    return Native.apply


bind_mapped = bind_both_modes


def for_weights(model: Any, loss: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function of `x` with the value of `loss(call, grad, x)` and its gradients by the weights."""

    def run(x: torch.Tensor) -> Any:
        value = loss(model, _grad_with_graph, x)
        return value.detach(), torch.autograd.grad(value, [w.value for w in model.trainable_variables])

    return run


def _grad_with_graph(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: _gradient(f, x.requires_grad_(), True)


def grad(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: _gradient(f, x.detach().requires_grad_(), False)


def _gradient(f: Callable[..., Any], x: torch.Tensor, create_graph: bool) -> torch.Tensor:
    return torch.autograd.grad(f(x), x, create_graph=create_graph)[0]


jacobian, hessian = torch.func.jacrev, torch.func.hessian


def vmap_grad(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return torch.func.vmap(torch.func.grad(f))


def jvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    return lambda x: torch.func.jvp(f, (x,), (tangent,))


def hvp(f: Callable[..., Any], tangent: Any) -> Callable[[Any], Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(_gradient(f, leaf, True), leaf, tangent)[0]

    return run


def compiled_function(f: Callable[..., Any]) -> Callable[[Any], Any]:
    return torch.compile(f, backend="aot_eager")
