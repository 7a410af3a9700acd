"""An op in a program that torch.compile compiles, or that torch.export or torch.jit records."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import torch
from torch.compiler import is_dynamo_compiling

from multigrad.backend.base import Call, Run
from multigrad.backend.torch import private
from multigrad.backend.torch.eager import (
    apply_eagerly,
    dense_floating,
    mark_integers,
    node_of,
    nodes_from,
    refuse,
    refuse_compiled,
)
from multigrad.backend.torch.functorch import apply_transforming
from multigrad.backend.torch.state import (
    IN_THREAD,
    current_autocast,
    hide_from_trace,
    is_transforming_traced,
    restore_autocast,
)
from multigrad.backend.torch.tensors import FLOATING, distinct, specs_of
from multigrad.common.closure import restore
from multigrad.common.errors import closed_over_error


def _without_aliases(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs, with a copy of each that shares memory with an input or another output.

    If outputs of a program share memory, PyTorch (2.13) computes one from the other after the run, without
    the rule.
    """
    owners: list[torch.Tensor] = []
    for tensor in inputs:
        owners.append(private.base_of(tensor))  # noqa: PERF401 - a function to Dynamo
    copied: list[torch.Tensor] = []
    for output in outputs:
        owner = private.base_of(output)
        for other in owners:
            if owner is other:
                output = output.clone()
                break
        owners.append(owner)
        copied.append(output)
    return copied


def apply_compiled(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return the outputs of a call that Dynamo traces. It cannot trace `restore`, which makes functions."""
    if is_transforming_traced():
        return _apply_uncompiled(call, tensors)
    if _is_exporting():
        run = call.run(tensors)
        return _without_derivative(run.inputs, run.outputs)
    if IN_THREAD.in_rule and not torch.is_grad_enabled():
        # The gradient of a rule is not differentiated here. Dynamo cannot enter a scope in a backward pass.
        return call.outputs(tensors)
    keeps_history = IN_THREAD.keeps_history and torch.is_grad_enabled()
    if keeps_history:
        run, outputs, markers = _run_recorded(call, tensors)
        inputs = run.inputs
        keeps_history = _require_gradients([*inputs, *markers])
    else:
        used = _UsedTensors()
        with torch.no_grad(), used:
            run = call.run(tensors)
            outputs = _without_aliases(run.inputs, run.outputs)
        inputs, markers = run.inputs, []
        if torch.is_grad_enabled() and used.include_others(inputs):
            return _apply_closed_over(call, tensors)
    run.rule.specs = specs_of(inputs)
    state = run.rule, run.user_rule, run.scope_values, current_autocast(), keeps_history, len(outputs)
    # Dynamo enters no scope in a backward pass, and traces it here.
    with run.rule.scope_of(run.scope_values), _enter_rule(), _allow_marks(outputs if keeps_history else ()):
        tied = _InProgram.apply(state, *distinct(inputs), *outputs, *markers)
    if keeps_history:  # the rule uses the outputs, and the caller may change its own in place
        tied = [output.clone() for output in tied]
    return tied


@torch.compiler.assume_constant_result  # Dynamo (PyTorch 2.12) takes `is_exporting()` for True
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


def _run_recorded(
    call: Call, tensors: Sequence[torch.Tensor]
) -> tuple[Run, list[torch.Tensor], list[torch.Tensor]]:
    """Run the function where its results may have a history.

    Returns:
        the run, outputs whose history a node may replace, and the tensors that `_markers` returns for them.
    """
    computed = _Computed()
    with torch.enable_grad(), computed:
        run = call.run(tensors)
        outputs = _without_aliases(run.inputs, run.outputs)
        markers = _markers(closed_over_error(call.name, None), list(run.inputs), outputs)
    if not _require_gradients([*run.inputs, *markers]):
        return run, [output.detach() for output in outputs], []
    outputs = computed.copies_of_others(outputs)
    for output in outputs:
        if private.base_of(output) is output:
            output.detach_()  # a saved result of the function would be found changed
    return run, outputs, markers


@torch.compiler.allow_in_graph
def _markers(error: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return an empty tensor for each output. Its derivative raises the error if the output depends on a
    differentiated tensor other than the inputs."""
    ends = {node_of(tensor) for tensor in inputs if tensor.requires_grad}
    markers = []
    for output in outputs:
        marker = output.detach().flatten()[:0]
        nodes = nodes_from([node_of(output)], ends) if output.requires_grad else set()
        if any([node not in ends and not node.next_functions for node in nodes]):
            (marker,) = refuse([marker], error, output)
        markers.append(marker)
    return markers


def _require_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    return any([tensor.requires_grad for tensor in tensors])


class _Computed(torch.overrides.TorchFunctionMode):
    """Collects the tensors that a function computes. A node may replace their history, but no other's."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor) and not IN_THREAD.in_rule:  # Dynamo would refuse the change
                self.tensors.append(part)
        return result

    def copies_of_others(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs, with a copy of each that the function did not compute."""
        copied = []
        for output in outputs:
            for tensor in self.tensors:
                if tensor is output:
                    copied.append(output)
                    break
            else:
                copied.append(output.clone())
        return copied


class _UsedTensors(torch.overrides.TorchFunctionMode):
    """Collects the tensors that require a gradient and that operations use. Without recording, the results of
    these operations require none."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.detach and function.__name__ != "__get__":  # an attribute
            for arg in args:
                for part in arg if isinstance(arg, (tuple, list)) else (arg,):
                    if isinstance(part, torch.Tensor) and part.requires_grad:
                        self.tensors.append(part)
        return function(*args, **(kwargs or {}))

    def include_others(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a tensor is neither an input nor a view of one."""
        for tensor in self.tensors:
            for x in inputs:
                if private.base_of(tensor) is private.base_of(x):
                    break
            else:
                return True
        return False


@contextlib.contextmanager
def _allow_marks(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a Function mark these outputs as changed, though their values stay the same."""
    if not outputs:
        yield
        return
    with private.preserve_version_counters(tuple(outputs)):
        yield


@contextlib.contextmanager
def _enter_rule() -> Iterator[None]:
    before = IN_THREAD.in_rule
    IN_THREAD.in_rule = True
    try:
        yield
    finally:
        IN_THREAD.in_rule = before


# Keras creates the attribute for the active scope when the first one is entered. Dynamo would see the change,
# and recompile a function after its first call.
with keras.StatelessScope(initialize_variables=False):
    pass


# With `fullgraph`, Dynamo raises an error with this reason. Without, it runs the function uncompiled.
_apply_uncompiled = torch.compiler.disable(
    apply_transforming,
    reason="PyTorch (2.13) ignores custom gradients when it compiles torch.func and forward mode; compile "
    "without fullgraph, or apply the transform to a function that is not compiled",
)


# It raises an error in the backward pass, if that computes the gradient of the tensor.
_apply_closed_over = torch.compiler.disable(
    apply_eagerly,
    reason="the output of an op of multigrad depends on a differentiated tensor that is not an argument of "
    "the op, so the tensor has no gradient; pass it as an argument, or detach it",
)


class _InProgram(torch.autograd.Function):
    """A Function in a program. It keeps the rule itself: compiled code has no reference cycles.

    Where the rule runs uncompiled, the residuals have no history, and a derivative of its gradient raises an
    error. In a program that is exported, they have it.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        # `*args`: Dynamo (PyTorch 2.13) omits `ctx` if there is one parameter less than arguments.
        ctx.state, *tensors = args
        rule, _, _, _, keeps_history, count = ctx.state
        inputs = len(rule.specs)
        outputs = tensors[inputs : inputs + count]  # followed by the results of `_markers`
        ctx.save_for_backward(*tensors[:inputs])  # not in the program, which does not use them
        if keeps_history:
            ctx.mark_dirty(*outputs)  # existing outputs get the node, also those in the rule
        mark_integers(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    @private.skip_frames
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rule, user_rule, scope_values, autocast, keeps_history, _ = ctx.state
        end = 1 + len(rule.specs)
        needed = ctx.needs_input_grad[1:end]
        recording = torch.is_grad_enabled()
        lacks_history = recording and not (keeps_history or is_dynamo_compiling())
        # Dynamo traces a backward pass without recording, and the program runs it with.
        recording = recording or (keeps_history and is_dynamo_compiling())
        with torch.set_grad_enabled(recording), restore_autocast(autocast):
            gradients = rule.call(user_rule, scope_values, dense_floating(upstream), needed)
        if lacks_history:
            gradients = refuse_compiled(gradients, ctx.saved_tensors)
        return None, *gradients, *[None for _ in ctx.needs_input_grad[end:]]


def apply_exporting(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Return the outputs of a call that is recorded for export.

    The program contains the operations of the function. It raises an error if it is differentiated through
    them, because their gradient is not the rule's. If the program itself takes a gradient, it uses a node
    that is attached without being recorded.
    """
    run = call.run(tensors)
    outputs, inputs = run.outputs, run.inputs
    # The outputs have no history except for the node. A program with `no_grad` or `detach` would have no
    # gradient, without an error. `torch.export` would record `no_grad`.
    with private.disable_torch_function(), torch.no_grad():
        copied = _without_derivative(inputs, outputs)
    if torch.is_grad_enabled() and _require_gradients(inputs):
        rule = run.lift(call.f)
        rule.specs = specs_of(inputs)
        # The copies of the outputs have the node, so that their derivative is the rule's.
        residuals = run.residuals_with(inputs, copied)
        user_rule, scope_values = restore(rule.template, residuals), residuals[rule.closure_count :]
        state = rule, user_rule, scope_values, current_autocast(), True, len(copied)
        with hide_from_trace():
            _InProgram.apply(state, *inputs, *copied)
    return copied


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
            tied = tied + _convert_zero(zero, output)
        copied.append(torch.ops.aten.copy(tied, output))
    return copied


def _convert_zero(zero: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return a zero in the dtype and on the device of an output.

    A conversion that is not needed would be recorded, too, with the device on which the program was recorded.
    """
    if zero.is_complex() and not output.is_complex():
        zero = zero.real
    if (zero.device, zero.dtype) == (output.device, output.dtype):
        return zero
    return zero.to(output.device, output.dtype)
