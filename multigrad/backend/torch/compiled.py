"""An op in a program that torch.compile compiles, or that torch.export or torch.jit records."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch.compiler import is_dynamo_compiling

from multigrad.backend.base import Call
from multigrad.backend.torch.eager import dense_floating, mark_integers, refuse_compiled
from multigrad.backend.torch.functorch import apply_transforming
from multigrad.backend.torch.private import disable_torch_function
from multigrad.backend.torch.state import autocasting, current_autocast, hidden_from_trace, is_transforming
from multigrad.backend.torch.tensors import FLOATING, TENSORS, distinct, specs_of
from multigrad.core.closure import lift, restore
from multigrad.core.process_wide import Shared


def _without_aliases(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs, with a copy of each that shares memory with an input or another output.

    If outputs of a program share memory, PyTorch (2.13) computes one from the other after the run, without
    the rule.
    """
    owners: list[torch.Tensor] = []
    for tensor in inputs:
        owners.append(tensor if tensor._base is None else tensor._base)  # noqa: PERF401 - a function to Dynamo
    copied: list[torch.Tensor] = []
    for output in outputs:
        owner = output if output._base is None else output._base
        for other in owners:
            if owner is other:
                output = output.clone()
                break
        owners.append(owner)
        copied.append(output)
    return copied


def apply_compiled(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the output of a call that Dynamo traces. It cannot trace `restore`, which makes functions."""
    if _is_transforming_traced():
        return _apply_uncompiled(call, tensors)
    if torch.compiler.is_exporting():
        run = call.run(tensors)
        return run.pullback.output.join(_without_derivative(run.inputs, run.outputs))
    with torch.no_grad():
        run = call.run(tensors)
        copied = _without_aliases(run.inputs, run.outputs)
    state = run.pullback, run.rule, specs_of(run.inputs), current_autocast(), False
    with run.pullback.scope_of(run.rule):  # Dynamo enters no scope in a backward pass, and traces it here
        tied = _InProgram.apply(state, *distinct(run.inputs), *copied)
    return run.pullback.output.join(tied)


# Keras creates the attribute for the active scope when the first one is entered. Dynamo would see the change,
# and recompile a function after its first call.
with keras.StatelessScope(initialize_variables=False):
    pass


@torch.compiler.assume_constant_result
def _is_transforming_traced() -> bool:
    """Return whether a transform is active around the code that Dynamo traces."""
    return is_transforming()


# With `fullgraph`, Dynamo raises an error with this reason. Without, it runs the function uncompiled.
_apply_uncompiled = torch.compiler.disable(
    apply_transforming,
    reason="PyTorch (2.13) ignores custom gradients when it compiles torch.func and forward mode; compile "
    "without fullgraph, or apply the transform to a function that is not compiled",
)


class _InProgram(torch.autograd.Function):
    """A Function in a program. It keeps the rule itself: compiled code has no reference cycles.

    Where Dynamo cannot trace the rule, it runs uncompiled. A derivative of the gradient then goes through
    the residuals that are inputs, and raises an error if it needs others. In a program that is exported, all
    residuals have their history.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        # `*args`: Dynamo (PyTorch 2.13) omits `ctx` if there is one parameter less than arguments.
        ctx.state, *tensors = args
        _, _, specs, _, exporting = ctx.state
        outputs = tensors[len(specs) :]
        ctx.save_for_backward(*tensors[: len(specs)])  # not in the program, which does not use them
        if exporting:
            ctx.mark_dirty(*outputs)  # existing outputs get the node
        mark_integers(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pullback, rule, specs, autocast, exporting = ctx.state
        needed = ctx.needs_input_grad[1 : 1 + len(specs)]
        opaque = False
        if torch.is_grad_enabled() and not (exporting or is_dynamo_compiling()):
            rule, opaque = _refusing(rule, ctx.saved_tensors)
        with autocasting(autocast):
            gradients = pullback.pull(rule, dense_floating(upstream), needed, specs)
        if opaque:
            gradients = refuse_compiled(gradients, ctx.saved_tensors)
        return None, *gradients, *(None,) * len(upstream)


def _refusing(rule: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], bool]:
    """Return the rule with residuals that raise when they are differentiated, and whether it is opaque.

    Inputs have their history. Other residuals were computed without recording.
    """
    residuals, template, opaque = lift(rule, TENSORS)
    for slot, residual in enumerate(residuals):
        if FLOATING[residual.dtype] and not any([residual is x for x in inputs]):
            (residuals[slot],) = refuse_compiled([residual], inputs)
    return restore(template, residuals), opaque


def apply_exporting(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the output of a call that is recorded for export.

    The program contains the operations of the function. It raises an error if it is differentiated through
    them, because their gradient is not the rule's. If the program itself takes a gradient, it uses a node
    that is attached without being recorded.
    """
    run = call.run(tensors)
    outputs, inputs = run.outputs, run.inputs
    # The outputs have no history except for the node. A program with `no_grad` or `detach` would have no
    # gradient, without an error. `torch.export` would record `no_grad`.
    with disable_torch_function(), torch.no_grad():
        copied = _without_derivative(inputs, outputs)
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs]):
        run.lift(call.f)
        # The copies of the outputs have the node, so that their derivative is the rule's.
        rule = restore(run.template, run.residuals_with(copied))
        state = run.pullback, rule, specs_of(inputs), current_autocast(), True
        with hidden_from_trace():
            _InProgram.apply(state, *inputs, *copied)
    return run.pullback.output.join(copied)


def _without_derivative(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return copies of the outputs, which a recorded program cannot differentiate with respect to an input.

    `aten::copy(y, y)` equals `y` and has no derivative: PyTorch raises an error in the backward pass. Every
    format in which Keras exports a model has this operation, except for ONNX through TorchScript.
    """
    if torch.onnx.is_in_onnx_export():
        return [output.clone() for output in outputs]
    # Also if the function is not differentiable where its rule is, such as a step: add the sum of nothing.
    zeros = [tensor.flatten()[:0].sum() for tensor in inputs if FLOATING[tensor.dtype]]
    copied: list[torch.Tensor] = []
    for output in outputs:
        tied = output
        for zero in zeros if FLOATING[output.dtype] else ():
            tied = tied + _converted(zero, output)
        copied.append(torch.ops.aten.copy(tied, output))
    return copied


def _converted(zero: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return a zero in the dtype and on the device of an output.

    A conversion that is not needed would be recorded, too, with the device on which the program was recorded.
    """
    if zero.is_complex() and not output.is_complex():
        zero = zero.real
    if (zero.device, zero.dtype) == (output.device, output.dtype):
        return zero
    return zero.to(output.device, output.dtype)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # "aot_eager" traces both passes and skips code generation, which takes much longer. `isolate_recompiles`,
    # because functions with the same code share a limit of compilations, after which PyTorch silently runs
    # them uncompiled.
    compiled_function = torch.compile(function, backend="aot_eager", dynamic=False, isolate_recompiles=True)

    def run(*tensors: torch.Tensor) -> Any:
        # Dynamo (PyTorch 2.13) reads `.grad` after a graph break. It ignores the warning about it, except if
        # warnings are errors.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            return compiled_function(*tensors)

    return run


_UNCOMPILED = Shared(lambda: torch.compiler.set_stance("force_eager"))  # a process-wide setting


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _UNCOMPILED
