"""PyTorch.

The native way to bind a custom derivative is a `torch.autograd.Function`: `forward` computes and saves
residuals on `ctx`, `backward` reads them. It deviates here in three things.

- The function runs before the node exists, so that what it runs decides what the node's inputs are.
- A second derivative goes through what the rule closed over. An input or an output there comes back from
  `ctx.saved_tensors` with its history; for an intermediate the function runs once more on the saved
  inputs, recorded this time, and only when the backward pass is itself being recorded.
- Inside torch.func, forward mode and torch.compile, a Function of the kind that each of them accepts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from multigrad.backend import Forward, Pullback, Spec
from multigrad.closure import TypeSet, cells_of, lift, restore
from multigrad.errors import message

TENSORS = TypeSet(torch.Tensor)


def is_differentiable(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex


def spec(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.shape, tensor.dtype)


def shape_of(tensor: torch.Tensor | Spec) -> tuple[int, ...]:
    return tuple(tensor.shape)


def conform(gradient: torch.Tensor, spec: Spec) -> torch.Tensor:
    if gradient.shape != spec.shape:
        gradient = gradient.sum_to_size(spec.shape)
    if gradient.dtype.is_complex and not spec.dtype.is_complex:
        gradient = gradient.real
    return gradient.to(spec.dtype)


def concrete(tensor: torch.Tensor) -> np.ndarray | None:
    if _transforming() or torch.compiler.is_compiling():
        return None
    return tensor.detach().to("cpu", torch.complex128 if tensor.dtype.is_complex else None).numpy()


def _transforming() -> bool:
    """Whether torch.func or forward mode is at work, for which a Function must be of another kind.

    Private, both: PyTorch (2.13) has no public way to ask, and the kinds cost twice or fail without.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def apply(forward: Forward, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if torch.compiler.is_dynamo_compiling():
        return _apply_compiling(forward, tensors)
    if _transforming():
        return _apply_transforming(forward, tensors)
    recording = torch.is_grad_enabled() and any([t.requires_grad for t in tensors])
    with torch.no_grad():
        outputs, rule, pullback = forward(tensors)
        call = _Call(forward, tensors, outputs, rule, pullback) if recording else None
    if call is not None:
        return list(_Node.apply(call, *tensors))
    if torch.is_grad_enabled():
        # What requires a gradient all the same was closed over, and has none through the rule.
        return [o.detach() if o.requires_grad else o for o in outputs]
    return outputs


# ------------------------------------------------------------------------------------------ eager


class _Call:
    """What a node keeps of its call beside the saved tensors, and the rule made whole from both."""

    __slots__ = ("count", "forward", "output_slots", "outputs", "pullback", "saved", "template")

    def __init__(
        self,
        forward: Forward,
        tensors: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        rule: Callable[..., Any],
        pullback: Pullback,
    ) -> None:
        lifted = lift(rule, TENSORS, cells_of(forward.f))
        self.template = lifted.template
        self.pullback = pullback
        # The two that `_Node.forward` takes, and leaves None: a node that kept them would be a cycle.
        self.outputs: list[torch.Tensor] | None = [_own(output, tensors) for output in outputs]
        self.output_slots: set[int] = set()
        lost = lifted.opaque
        for slot, residual in enumerate(lifted.tensors):
            if any([residual is tensor for tensor in tensors]):
                continue
            for output, own in zip(outputs, self.outputs, strict=True):
                if residual is output:
                    self.output_slots.add(slot)
                    lifted.tensors[slot] = own
                    break
            else:
                lost |= is_differentiable(residual)
        self.count = len(lifted.tensors)
        # Only for a residual that is neither input nor output does a second derivative need the inputs.
        self.forward = forward if lost else None
        self.saved: Sequence[torch.Tensor] | None = (
            [*lifted.tensors, *tensors] if lost else lifted.tensors
        )

    def rule(self, saved: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """The rule, around the saved tensors."""
        if self.forward is None or not torch.is_grad_enabled():
            return restore(self.template, saved)
        return self._recorded_rule(saved[: self.count], saved[self.count :])

    def _recorded_rule(
        self, residuals: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        """The rule, around residuals that carry the history of how they came from the inputs."""
        assert self.forward is not None
        _, rule, _ = self.forward(tensors)
        lifted = lift(rule, TENSORS, cells_of(self.forward.f))
        again = [
            old if slot in self.output_slots else new
            for slot, (old, new) in enumerate(zip(residuals, lifted.tensors, strict=False))
        ]
        if len(again) != len(residuals) or not all(map(_alike, residuals, again)):
            raise RuntimeError(
                message(
                    self.forward.name,
                    "the function gave other values when it ran again for a second derivative",
                    required="a function that gives the same values for the same arguments",
                    got="other values in a tensor that the rule closes over",
                    mend="draw random numbers outside the function and pass them as arguments",
                )
            )
        return restore(lifted.template, again)


def _own(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor object that is this call's alone, so that it can be given this call's node.

    The function may return a constant, one tensor twice, or an input. An alias of an input stays a view,
    for which PyTorch knows what an in-place change means. (`_is_view` is private: PyTorch 2.13 has no
    public name for it.)
    """
    if output._is_view() or any([output is tensor for tensor in inputs]):
        return output.view_as(output)
    return output.detach()


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two runs of one function gave the same, up to a reordered sum."""
    if old is new:
        return True
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if not is_differentiable(old):
        return torch.equal(old, new)
    return torch.allclose(old, new, rtol=1e-2, atol=1e-2, equal_nan=True)


class _Node(torch.autograd.Function):
    """Ties the outputs of a call, which has run, to its inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = call.outputs, call.saved
        call.outputs = call.saved = None
        assert outputs is not None and saved is not None
        ctx.call = call
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*[o for o in outputs if not is_differentiable(o)])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        rule = call.rule(ctx.saved_tensors)
        return None, *call.pullback(rule, _of_differentiable(upstream), ctx.needs_input_grad[1:])


def _of_differentiable(upstream: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """PyTorch has zeros for an output without a gradient; the rule gets None."""
    return [u if u is not None and is_differentiable(u) else None for u in upstream]


# ----------------------------------------------------------------------------- torch.func, jvp, vmap


class _Composed:
    """What `_Transformed` learns of a call while its forward runs, the same at every level."""

    __slots__ = ("count", "pullback", "residuals", "template")


def _apply_transforming(forward: Forward, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    composed = _Composed()
    outputs = _Transformed.apply(forward, composed, *tensors)
    return list(outputs[: composed.count])


class _Transformed(torch.autograd.Function):
    """A Function for torch.func's transforms, which take it apart: residuals are outputs here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        forward: Forward, composed: _Composed, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs, rule, composed.pullback = forward(tensors)
        lifted = lift(rule, TENSORS, cells_of(forward.f))
        composed.count = len(outputs)
        composed.template = lifted.template
        known = {id(output): len(tensors) + i for i, output in enumerate(outputs)}
        known |= {id(tensor): i for i, tensor in enumerate(tensors)}
        extra: list[torch.Tensor] = []
        composed.residuals = []
        for residual in lifted.tensors:
            if id(residual) not in known:
                known[id(residual)] = len(tensors) + len(outputs) + len(extra)
                extra.append(residual)
            composed.residuals.append(known[id(residual)])
        return *[_own(output, tensors) for output in outputs], *[_own(e, tensors) for e in extra]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.forward, ctx.composed, *tensors = inputs
        ctx.inputs = len(tensors)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        extra = output[ctx.composed.count :]
        ints = [o for o in output[: ctx.composed.count] if not is_differentiable(o)]
        ctx.mark_non_differentiable(*ints, *extra)

    @staticmethod
    def _rule(ctx: Any, saved: Sequence[torch.Tensor]) -> Callable[..., Any]:
        composed, count = ctx.composed, ctx.inputs
        last = count + composed.count
        if not torch.is_grad_enabled() or max(composed.residuals, default=-1) < last:
            return restore(composed.template, [saved[i] for i in composed.residuals])
        _, rule, _ = ctx.forward(saved[:count])
        lifted = lift(rule, TENSORS, cells_of(ctx.forward.f))
        residuals = [
            saved[i] if i < last else new
            for i, new in zip(composed.residuals, lifted.tensors, strict=True)
        ]
        return restore(lifted.template, residuals)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rule = _Transformed._rule(ctx, ctx.saved_tensors)
        own = _of_differentiable(upstream[: ctx.composed.count])
        return None, None, *ctx.composed.pullback(rule, own, ctx.needs_input_grad[2:])

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        count, outputs = ctx.inputs, saved[ctx.inputs :]
        needed = [tangent is not None for tangent in tangents[2:]]
        rule = _Transformed._rule(ctx, saved)
        differentiable = [is_differentiable(o) for o in outputs[: ctx.composed.count]]

        def vjp(*upstream: torch.Tensor) -> list[torch.Tensor]:
            every = iter(upstream)
            whole = [next(every) if d else None for d in differentiable]
            gradients = ctx.composed.pullback(rule, whole, needed)
            return [
                torch.zeros_like(saved[i]) if g is None else g
                for i, g in enumerate(gradients)
                if needed[i]
            ]

        zeros = [torch.zeros_like(o) for o, d in zip(outputs, differentiable, strict=False) if d]
        _, transpose = torch.func.vjp(vjp, *zeros)
        answer = iter(transpose([tangent for tangent in tangents[2:] if tangent is not None]))
        own = [next(answer) if d else None for d in differentiable]
        return *own, *[None] * (len(outputs) - ctx.composed.count)


# -------------------------------------------------------------------------------- torch.compile


def _apply_compiling(forward: Forward, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(_Compiled.apply(forward, *tensors))


class _Compiled(torch.autograd.Function):
    """A Function that Dynamo traces whole: it cannot follow the making of functions in `restore`."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.rule, ctx.pullback = forward(tensors)
        ctx.mark_non_differentiable(*[o for o in outputs if not is_differentiable(o)])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.pullback(ctx.rule, _of_differentiable(upstream), ctx.needs_input_grad[1:])


# ------------------------------------------------------------------------------------- gradients


def value_and_grad(
    function: Callable[..., tuple[torch.Tensor, Any]], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    if _transforming() or torch.compiler.is_compiling():
        places = tuple(range(len(tensors)))
        gradients, (value, aux) = torch.func.grad_and_value(function, places, has_aux=True)(*tensors)
        return (value, aux), list(gradients)
    grad_mode = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]
        value, aux = function(*own)
    if not value.requires_grad:
        return (value, aux), [torch.zeros_like(t) for t in tensors]
    # The backward pass is recorded where a second derivative can be asked for: the value depends on
    # something, an argument or closed over, that has a gradient outside.
    outer = grad_mode and _depends_on_others(value, own)
    gradients = torch.autograd.grad(value, own, create_graph=outer, materialize_grads=True)
    return (value if outer else value.detach(), aux), list(gradients)


def _depends_on_others(value: torch.Tensor, own: Sequence[torch.Tensor]) -> bool:
    """Whether the graph of `value` has a leaf that is not one of `own`."""
    seen = set()
    nodes = [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only the node of a leaf has one
        if leaf is not None and not any(leaf is tensor for tensor in own):
            return True
        nodes.extend(parent for parent, _ in node.next_functions)
    return False
