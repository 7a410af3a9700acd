"""An op in a program: compiled by torch.compile, or written down by torch.export and torch.jit."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from multigrad.backend.base import Call, Pullback
from multigrad.backend.torch.eager import is_alias, mark_integers, of_floating
from multigrad.backend.torch.functorch import apply_transforming
from multigrad.backend.torch.state import autocast_here, autocasting, is_transforming, unwritten
from multigrad.backend.torch.tensors import specs_of
from multigrad.core.process_wide import Shared


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Aliases where a tensor comes twice, which Dynamo (PyTorch 2.13) does not take."""
    distinct: list[torch.Tensor] = []
    for tensor in tensors:
        for other in distinct:
            if tensor is other:
                tensor = tensor.view_as(tensor)
                break
        distinct.append(tensor)
    return distinct


def _apart(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, copied where one shares memory with an input or another one.

    Of outputs of the program that share theirs, PyTorch (2.13) makes one of the other anew when it has run,
    past the rule. (`_base` is private: PyTorch 2.13 has no public name for the tensor of a view.)
    """
    owners: list[torch.Tensor] = []
    for tensor in inputs:
        owners.append(tensor if tensor._base is None else tensor._base)  # noqa: PERF401 - a function to Dynamo
    apart: list[torch.Tensor] = []
    for output in outputs:
        owner = output if output._base is None else output._base
        for other in owners:
            if owner is other:
                output = output.clone()
                break
        owners.append(owner)
        apart.append(output)
    return apart


def apply_compiled(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The op as Dynamo traces it whole; it cannot follow the making of functions in `restore`."""
    if _is_transforming_traced():
        return _apply_uncompiled(call, tensors)
    if torch.compiler.is_exporting():
        outputs, _, _, back = call.run(tensors)
        return back.output.join([output.detach() for output in outputs])
    with torch.no_grad():
        outputs, rule, inputs, back = call.run(tensors)
        own = _apart(inputs, outputs)
    code = back, rule, specs_of(inputs), autocast_here()
    return back.output.join(_Compiled.apply(code, *_distinct(inputs), *own))


# Keras keeps the scope in force from the first one on. Dynamo would notice, and compile a function anew
# after its first call.
with keras.StatelessScope(initialize_variables=False):
    pass


@torch.compiler.assume_constant_result
def _is_transforming_traced() -> bool:
    """The same, around the place of the program that Dynamo traces."""
    return is_transforming()


# With `fullgraph` this is an error that gives the reason; without, PyTorch runs the function as it is.
_apply_uncompiled = torch.compiler.disable(
    apply_transforming,
    reason="torch.func and forward mode, as PyTorch (2.13) compiles them, take no notice of a custom "
    "gradient; compile without fullgraph, or apply the transform to a function that is not compiled",
)


class _Compiled(torch.autograd.Function):
    """A Function that ties outputs to inputs by a rule that is left as it is: compiled code has no cycles."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        # Dynamo (PyTorch 2.13) leaves `ctx` out where there happens to be one parameter less than arguments.
        ctx.code, *tensors = given
        _, _, specs, _ = ctx.code
        outputs = tensors[len(specs) :]
        mark_integers(ctx, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back, rule, specs, autocast = ctx.code
        needed = ctx.needs_input_grad[1 : 1 + len(specs)]
        with autocasting(autocast):
            gradients = back.pull(rule, of_floating(upstream), needed, specs)
        return None, *gradients, *(None,) * len(upstream)


def apply_exporting(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The op in a program that is written down for elsewhere.

    What is written are the operations of the function, detached: better no gradient than theirs. For a
    gradient inside of the program, the outputs get a node while nothing is written.
    """
    outputs, rule, inputs, back = call.run(tensors)
    own = [output.clone().detach() if is_alias(output, inputs) else output.detach() for output in outputs]
    if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in inputs]):
        with unwritten():
            _Exported.apply(back, rule, specs_of(inputs), *inputs, *own)
    return back.output.join(own)


class _Exported(torch.autograd.Function):
    """A Function that attaches itself to outputs that are there."""

    @staticmethod
    def forward(
        ctx: Any, back: Pullback, rule: Callable[..., Any], specs: Any, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back, ctx.rule, ctx.specs = back, rule, specs
        outputs = tensors[len(specs) :]
        ctx.mark_dirty(*outputs)
        mark_integers(ctx, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[3 : 3 + len(ctx.specs)]
        gradients = ctx.back.pull(ctx.rule, of_floating(upstream), needed, ctx.specs)
        return None, None, None, *gradients, *[None for _ in upstream]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # "aot_eager" traces both passes and generates no code, which would take many times as long. Functions of
    # one code share their compilations, of which PyTorch makes a few and then runs the code as it is, in
    # silence: so this one has its own.
    whole = torch.compile(function, backend="aot_eager", dynamic=False, isolate_recompiles=True)

    def run(*tensors: torch.Tensor) -> Any:
        # Dynamo (PyTorch 2.13) looks at `.grad` behind a graph break, and hides the warning of that only from
        # those for whom it is no error.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
            return whole(*tensors)

    return run


_UNCOMPILED = Shared(lambda: torch.compiler.set_stance("force_eager"))  # it is one for all threads


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _UNCOMPILED
