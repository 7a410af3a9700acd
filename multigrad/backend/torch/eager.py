"""The node of a call in eager code."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import is_grad_enabled

from multigrad.backend.base import Call, Pullback, Ran, Spec
from multigrad.backend.torch.state import (
    autocast_here,
    autocasting,
    bare,
    drawing_apart,
    is_autocast_anywhere,
    is_unreadable,
    mappings,
    past_transforms,
)
from multigrad.backend.torch.tensors import FLOATING, TENSORS, is_differentiable, specs_of
from multigrad.core.closure import lift, restore
from multigrad.core.errors import message


class HasRun(NamedTuple):
    """A call whose function ran already, and what that gave."""

    call: Call
    ran: Ran


class MoreInputs(Exception):
    """A function turned out to have more inputs than its node: a `HasRun`, and all of the inputs."""


class _Residuals(NamedTuple):
    """What the backward pass needs beside the saved tensors."""

    back: Pullback
    template: Any
    """The rule around slots for the saved residuals."""
    slots: Sequence[int] | None
    """The index of the saved tensor of each residual, None where every residual is saved once."""
    specs: list[Spec | None]
    autocast: Any
    call: Call | None
    """The call, whose function runs again for a second derivative; None where that is not needed."""
    tied: Sequence[int]
    """The slots of residuals that are outputs."""
    opaque: bool
    """Whether the rule holds an object that may hold tensors."""
    closed_over: Sequence[Any]
    """The nodes of residuals that have a history from outside of the op, which must stay alive."""


class _Node(torch.autograd.Function):
    """The node of a call. It keeps the code around the saved tensors (see `closure.py`) on `ctx`.

    The function runs inside, on the node's inputs. Where it turns out to have more of them, because it
    read variables, this node is left, and one with all inputs is attached to what it gave.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, *tensors: torch.Tensor) -> Sequence[Any]:
        if type(call) is HasRun:
            call, (outputs, rule, _, back) = call
        else:
            outputs, rule, inputs, back = ran = call.run(tensors)
            if inputs is not tensors:
                raise MoreInputs(HasRun(call, ran), *inputs)
        residuals, template, opaque = lift(rule, TENSORS, call.f)
        tie = _tie if len(tensors) <= 8 else _tie_many
        own, tied, beside, computed = tie(tensors, outputs, residuals)
        slots = None
        if type(template) is not tuple:
            distinct = dict(zip(map(id, residuals), residuals, strict=True))
            if len(distinct) < len(residuals):
                # What stands in several places of the rule is saved once: a hook that copies would copy it
                # twice.
                slots = list(map(list(distinct).index, map(id, residuals)))
                residuals = list(distinct.values())
        # Inputs and outputs come back from PyTorch with their history. For a residual that was computed
        # on the way, a second derivative runs the function again, and needs its inputs.
        if not (computed or opaque):
            ctx.save_for_backward(*residuals)
            call = None
        elif call.options.higher_order:
            ctx.save_for_backward(*residuals, *tensors)
        else:
            ctx.save_for_backward(*residuals)
            ctx.anchors = _anchors([*tensors, *lift(call.f, TENSORS)[0]])
        autocast = autocast_here() if is_autocast_anywhere() else None
        specs = specs_of(tensors)
        ctx.multigrad = _Residuals(back, template, slots, specs, autocast, call, tied, opaque, beside)
        # Usually there is one output. For others their layout goes before them.
        return own[0] if back.output.is_one else (back.output, *own)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back, template, slots, specs, autocast, call, tied, opaque, _ = ctx.multigrad
        if (autocast or is_autocast_anywhere()) and autocast != autocast_here():
            with autocasting(autocast):
                return _Node.backward(ctx, *upstream)
        saved = ctx.saved_tensors
        if slots is not None:
            saved = *[saved[slot] for slot in slots], *saved[max(slots) + 1 :]
        if not back.output.is_one:
            upstream = of_floating(upstream[1:])
        elif upstream[0] is not None and upstream[0].is_sparse:
            upstream = of_floating(upstream)
        needed = ctx.needs_input_grad[1:]
        if call is None or not is_grad_enabled():
            return None, *back.pull(restore(template, saved), upstream, needed, specs)
        if not call.options.higher_order:
            with torch.no_grad():
                gradients = back.pull(restore(template, saved), upstream, needed, specs)
            error = _first_order_alone(call)
            others = [t for t in (*saved, *upstream) if t is not None and t.requires_grad]
            return None, *[None if g is None else refuse(g, error, *ctx.anchors, *others) for g in gradients]
        count = len(saved) - len(specs)
        if opaque:
            # What the rule reaches through an object has its history in a second run's rule alone. Whether
            # that is the same rule, only what it gives can tell, and only before the second run puts
            # something else into the object. It draws the same numbers both times.
            with torch.no_grad(), drawing_apart(), call.rehearsal():
                given = _copies(upstream)
                first = _copies(back.untraced.pull(restore(template, saved), given, needed, specs))
        with drawing_apart():
            again, residuals, _ = run_again(call, back, count, saved[count:])
        residuals = with_history(saved[:count], residuals, tied)
        require_alike(call, saved[:count], residuals)
        if not opaque:
            return None, *back.pull(restore(template, residuals), upstream, needed, specs)
        gradients = back.pull(restore(again, residuals), upstream, needed, specs)
        if not all(map(_alike, first, gradients)):
            raise _not_the_same_rule(call)
        return None, *gradients


# `Function.apply`, and what calls `backward`, without what they do for a `setup_context`, for transforms and
# for other kinds of Function before they come to this, which takes as long as an operation on a small tensor.
# `_backward_cls`, the class of the node, is private: PyTorch (2.13) has no public way past it.
attach = super(torch.autograd.Function, _Node).apply
_Node._backward_cls.apply = _Node.backward


def join_of(output: Any) -> Any:
    """The op's output, of what `attach` gives: a tensor, or the layout and the tensors of several."""
    if type(output) is not tuple:
        return output
    layout, *tensors = output
    return layout.join(tensors)


def _tie(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], residuals: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Sequence[int], Sequence[Any], bool]:
    """The node's own tensors for the outputs, which come in the place of those among the residuals.

    The function may return a constant, one tensor twice, or an input. An alias of an input stays a view,
    for which PyTorch knows what an in-place change means. (`_is_view` is private: PyTorch 2.13 has no
    public name for it.)

    Returns, behind them, the slots of residuals that are outputs, the nodes of those that were closed over
    with their history, and whether one was computed on the way from inputs to outputs.
    """
    own: list[torch.Tensor] = []
    for output in outputs:
        alias = output._is_view()
        for tensor in inputs:
            if output is tensor:
                alias = True
        own.append(output.view_as(output) if alias else output.detach())
    tied: tuple[int, ...] = ()
    beside: tuple[Any, ...] = ()
    computed = False
    for slot, residual in enumerate(residuals):
        for tensor in inputs:
            if residual is tensor:
                break  # an output that is an input is the input
        else:
            if residual.requires_grad and not is_view_within(residual):
                beside = *beside, node_of(residual)
                continue
            for place, output in enumerate(outputs):
                if residual is output:
                    residuals[slot] = own[place]
                    tied = *tied, slot
                    break
            else:
                computed = computed or FLOATING[residual.dtype]
    return own, tied, beside, computed


def _tie_many(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], residuals: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Sequence[int], Sequence[Any], bool]:
    """The same for many inputs: to look for each residual among all of them takes the square of the time."""
    given = set(map(id, inputs))
    slots = [slot for slot, residual in enumerate(residuals) if id(residual) not in given]
    others = [residuals[slot] for slot in slots]
    own, tied, beside, computed = _tie([o for o in outputs if id(o) in given], outputs, others)
    for slot, residual in zip(slots, others, strict=True):
        residuals[slot] = residual
    return own, [slots[i] for i in tied], beside, computed


def is_view_within(tensor: torch.Tensor) -> bool:
    """Whether it is a view that the function made, where nothing is recorded, of what requires a gradient.

    PyTorch says of such a view that it requires one, too, and gives it no node.
    """
    return tensor._is_view() and tensor.grad_fn is None and tensor._base.requires_grad


def run_again(
    call: Call, first: Pullback, count: int, tensors: Sequence[torch.Tensor]
) -> tuple[Any, list[torch.Tensor], Sequence[torch.Tensor]]:
    """The template of a second run's rule, as many residuals, with the history of how they came from the
    inputs, and the outputs.

    The function runs again for it, because in its first run nothing was recorded.
    """
    outputs, rule, _, _ = call.run_again(tensors, first)
    residuals, template, _ = lift(rule, TENSORS, call.f)
    if len(residuals) != count:
        raise _not_repeatable(call)
    return template, residuals, outputs


def with_history(
    first: Sequence[torch.Tensor], again: Sequence[torch.Tensor], known: Sequence[int]
) -> list[torch.Tensor]:
    """The residuals of a first run, in whose place those of a second come where these have a history.

    Those in the slots `known` have theirs already. What depends on no input, such as a mask, has none.
    """
    pairs = enumerate(zip(first, again, strict=True))
    return [old if slot in known or not new.requires_grad else new for slot, (old, new) in pairs]


def _copies(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The same numbers, in which a rule, or a second run, may write."""
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def _first_order_alone(call: Call) -> str:
    return message(
        call.name,
        "a derivative of its gradient was asked for, which it was defined without",
        required="an op with higher_order=True",
        got="one with higher_order=False",
        fix="leave higher_order out, which keeps the inputs of the op for it",
    )


def require_alike(call: Call, first: Sequence[Any], again: Sequence[Any]) -> None:
    """See that a function which ran twice gave the same."""
    if not all(map(_alike, first, again)):
        raise _not_repeatable(call)


def _not_repeatable(call: Call) -> RuntimeError:
    return RuntimeError(
        message(
            call.name,
            "the function gave other values when it ran again for a derivative of what it computed",
            required="a function that gives the same values for the same arguments",
            got="other values, in the output or in what the rule uses",
            fix="draw random numbers outside the function, and pass them and other state as arguments",
        )
    )


def _not_the_same_rule(call: Call) -> RuntimeError:
    return RuntimeError(
        message(
            call.name,
            "the rule gave another gradient around a second run of the function, which a derivative of the "
            "gradient needs, because the rule reaches an object",
            required="the same gradient for the same arguments, as often as the function and the rule run",
            got="another one: what the object holds is not what it was, or the rule draws or counts",
            fix="let the rule close over what it uses, and pass random numbers and other state as arguments",
        )
    )


def _alike(first: torch.Tensor | None, again: torch.Tensor | None) -> bool:
    """Whether two runs of one function gave the same, up to the order of sums."""
    if first is None or again is None or first is again:
        return first is again
    if first.shape != again.shape or first.dtype != again.dtype:
        return False
    if is_unreadable(first):
        return True
    levels = sorted({level for tensor in (first, again) for level, _ in mappings(tensor)})
    with past_transforms():
        first, again = torch.broadcast_tensors(bare(first, levels), bare(again, levels))
        if not is_differentiable(first) or first.numel() == 0:
            return torch.equal(first, again)
        rounding = min(1e3 * torch.finfo(first.dtype).eps, 0.1)
        if first.dtype.itemsize == 1:  # of which PyTorch computes little
            first, again = first.float(), again.float()
        scale = first.abs().nan_to_num(posinf=0.0).max().item()
        return torch.allclose(first, again, rtol=rounding, atol=rounding * scale, equal_nan=True)


def is_alias(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether an output is an input, or a view."""
    return output._is_view() or any([output is tensor for tensor in inputs])


def mark_integers(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Tell PyTorch which outputs have no gradient: the integer ones."""
    ctx.mark_non_differentiable(*[o for o in outputs if not FLOATING[o.dtype]])


def of_floating(upstream: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the upstream gradients as a rule gets them.

    PyTorch has zeros for an integer output, where the rule gets None. Behind an op, a lookup such as
    `torch.nn.Embedding(sparse=True)` has a sparse gradient, with which Keras cannot compute.
    """
    return tuple(
        [None if u is None or not FLOATING[u.dtype] else u.to_dense() if u.is_sparse else u for u in upstream]
    )


class _Refused(torch.autograd.Function):
    """A result of which a derivative is an error, and not zero."""

    @staticmethod
    def forward(ctx: Any, error: str, result: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        ctx.error = error
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> NoReturn:
        raise RuntimeError(ctx.error)


def refuse(result: torch.Tensor, error: str, *beside: torch.Tensor) -> torch.Tensor:
    """The result, of which a derivative by what the tensors beside it came from is this error."""
    return _Refused.apply(error, result, *beside)


def _anchors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without elements that came from these, and keep nothing of them alive but their history."""
    with torch.enable_grad():
        return [tensor.reshape(-1)[:0].clone() for tensor in tensors if tensor.requires_grad]


def node_of(tensor: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node
