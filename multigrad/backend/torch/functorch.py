"""An op under torch.func and in forward mode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.autograd import forward_ad

from multigrad.backend.base import Call, Pullback, Ran, Spec
from multigrad.backend.torch.eager import (
    is_alias,
    mark_integers,
    of_floating,
    require_alike,
    run_again,
    with_history,
)
from multigrad.backend.torch.state import (
    Autocast,
    autocast_here,
    autocasting,
    batches,
    hooks_of_saving,
    is_empty,
    is_of_level_within,
    mappings,
    unwrapped,
)
from multigrad.backend.torch.tensors import TENSORS, is_differentiable, specs_of
from multigrad.core.closure import lift, restore
from multigrad.core.errors import TouchedVariable, message
from multigrad.core.linearity import FAR, require_linear, trial
from multigrad.core.reachable import reachable_tensors


def apply_transforming(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    found = _Found()
    if not (call.has_objects() or call.touches_variables() or next(_beside(call), None) is not None):
        try:
            outputs = _Transformed.apply(call, found, *tensors)
            return found.back.output.join(outputs[: found.outputs])
        except TouchedVariable:
            call.note_touched()
    # The values of variables, and what is closed over or reached by name, may be wrapped for a transform, and
    # then have no place inside of the Function, or may require a gradient. So the function runs outside of
    # it, recorded, and its outputs are tied to the inputs.
    ran = outputs, rule, inputs, back = call.run(tensors)
    others = found.note(call, ran)
    found.standing = True
    own = [output.detach() for output in outputs]
    at_work = batches()
    reached = reachable_tensors(rule, TENSORS) if found.opaque and at_work else ()
    # One that a vmap that has ended left behind is mapped no more.
    mapped = [tensor for tensor in reached if at_work >= set(mappings(tensor)) > set()]
    marks = [torch.zeros_like(tensor, dtype=torch.float32).sum() for tensor in mapped]
    outputs = _Transformed.apply(call, found, *inputs, *own, *others, *marks)
    return back.output.join(outputs[: found.outputs])


def is_apart(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call in the midst of a vmap has nothing that is mapped, and is as it is without.

    A checkpoint runs an op again where a backward pass comes to it. That may be mapped, as for a Jacobian,
    while the op is not. What it saves then takes the place of what it saved at first, by its order alone.
    """
    if forward_ad._current_level >= 0 or call.is_in_scope():
        return False
    # Something mapped may be reached through an object, but not where a checkpoint, which sets hooks, runs.
    if call.has_objects() and hooks_of_saving(False) is None:
        return False
    every = [*tensors, *_beside(call)]
    # Under the other transforms whatever is computed is wrapped.
    return not any(map(_is_wrapped, [*every, *[tensor.detach() for tensor in every[:1]]]))


def _beside(call: Call) -> Iterator[torch.Tensor]:
    """What the function may use beside its arguments.

    Direct globals count, as a gradient penalty may use weights that are globals, which no framework sees.
    """
    return reachable_tensors(call.f, TENSORS, with_globals=True)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


class _Found:
    """What is found out of a run, which is the same at every level.

    `places` says for each residual where it stands among inputs, outputs and the other residuals.
    `standing` is whether the function ran outside of the Function, which is given all three then, and zeros
    that are mapped as what the rule reaches through objects; `dual`, whether that had a derivative of forward
    mode.
    """

    autocast: "Autocast"
    back: Pullback
    dual = False
    inputs: int
    opaque: bool
    outputs: int
    places: list[int]
    specs: list[Spec | None]
    standing = False
    template: Any

    def note(self, call: Call, ran: Ran) -> list[torch.Tensor]:
        """Take all of it down, and return the residuals that are neither inputs nor outputs."""
        outputs, rule, inputs, self.back = ran
        residuals, self.template, self.opaque = lift(rule, TENSORS, call.f)
        everything = [*inputs, *outputs]
        # Of an output that is an input, the input's place.
        known = {id(tensor): i for i, tensor in reversed(list(enumerate(everything)))}
        others = list({id(other): other for other in residuals if id(other) not in known}.values())
        known |= {id(other): len(everything) + i for i, other in enumerate(others)}
        self.autocast, self.specs = autocast_here(), specs_of(inputs)
        self.inputs, self.outputs = len(inputs), len(outputs)
        self.places = [known[id(residual)] for residual in residuals]
        return others

    def parts(self, saved: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """The inputs, the outputs and the other residuals."""
        places = self.inputs, self.inputs + self.outputs
        return saved[: places[0]], saved[places[0] : places[1]], saved[places[1] :]


class _Transformed(torch.autograd.Function):
    """A Function that the transforms can take apart: residuals are outputs of it, too.

    Those have derivatives of their own, through the function, which runs again for them. In reverse mode
    that is when somebody asks, which a first derivative never does.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, found: _Found, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if found.standing:
            own = tensors[found.inputs : found.inputs + found.outputs]
        else:
            ran = call.run(tensors, strict=True)
            own = (*ran[0], *found.note(call, ran))
        mapped = _mapped_alike(own, tensors)
        # No output may be a view of an input: PyTorch would have its derivative in forward mode be one.
        return tuple([o.clone() if is_alias(o, tensors) else o.detach() for o in mapped])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, ctx.found, *tensors = inputs
        count = ctx.found.inputs
        saved = (*tensors[:count], *output, *tensors[count + ctx.found.outputs :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)  # to see which residuals are asked for
        mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found, all_needed = ctx.found, ctx.needs_input_grad[2:]
        saved = unwrapped(ctx.saved_tensors)
        inputs, outputs, _ = found.parts(saved)
        needed = all_needed[: len(inputs)]
        gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
        with autocasting(found.autocast):
            own, computed = upstream[: len(outputs)], upstream[len(outputs) :]
            if any([u is not None for u in own]):
                zeros = [torch.zeros_like(o) if u is None else u for u, o in zip(own, outputs, strict=True)]
                rule = _transformed_rule(ctx, saved)
                gradients = found.back.pull(rule, of_floating(zeros), needed, found.specs)
            if any([u is not None for u in computed]):
                by = [i for i, need in enumerate(needed) if need]
                more = dict(zip(by, _pull_residuals(ctx, saved, computed, by), strict=True))
                gradients = [_sum(gradient, more.get(i)) for i, gradient in enumerate(gradients)]
        return None, None, *gradients, *[None] * (len(all_needed) - len(inputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The transpose of the rule, which must be linear in the upstream gradient."""
        found = ctx.found
        given = [i for i, tangent in enumerate(tangents[2 : 2 + found.inputs]) if tangent is not None]
        # PyTorch (2.13) turns forward mode off here, and that of outer levels with it, whose derivative of
        # a tangent would be zero. So turn it on again, which only a private name can, for the primals.
        with forward_ad._set_fwd_grad_enabled(True), autocasting(found.autocast):
            saved = list(map(_primal, ctx.saved_tensors))
            inputs, outputs, others = found.parts(saved)
            rule = _transformed_rule(ctx, saved)
            needed = [i in given for i in range(len(inputs))]

            def vjp(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                gradients = found.back.untraced.pull(rule, upstream, needed, found.specs)
                return [torch.zeros_like(inputs[i]) if gradients[i] is None else gradients[i] for i in given]

            own = [tangents[2 + i] for i in given]
            if not any(map(is_empty, outputs)):
                with torch.no_grad():
                    tried = _tried(outputs)
                    far = vjp(*[None if u is None else FAR * u for u in tried])
                    require_linear(ctx.call.name, vjp(*tried), far, _innermost)
            pushed = _transposed(vjp, outputs, own)
            if found.standing:
                return tuple(pushed)

            def pull(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                return _pull_residuals(ctx, saved, upstream, given)

            return *pushed, *_transposed(pull, others, own)


def _tried(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Upstream gradients to try a rule on."""
    return [_trial(output) if is_differentiable(output) else None for output in outputs]


def _trial(output: torch.Tensor) -> torch.Tensor:
    if is_empty(output):
        return torch.ones_like(output)  # its size may be a symbol
    return torch.as_tensor(trial(output.shape), dtype=output.dtype, device=output.device)


def _innermost(tensor: torch.Tensor) -> np.ndarray:
    """The numbers in what torch.func wraps, which are read in no other way while it is at work."""
    return np.asarray(torch.func.debug_unwrap(tensor, recurse=True).tolist())


@torch.compiler.disable
def _mapped_alike(outputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The outputs, mapped by vmap wherever something beside them is.

    Where an output does not depend on what is mapped, vmap makes one of it for all, and the upstream
    gradients come summed: the rule would answer for the whole batch, in the name of each.
    """
    floating = [output for output in outputs if is_differentiable(output)]
    mapped = [tensor for tensor in beside if mappings(tensor)]
    if not (floating and mapped):
        return outputs
    # Real, whatever is mapped: to make a complex number real is a warning.
    like = {"dtype": torch.float32, "device": floating[0].device}
    zero = sum([torch.zeros_like(tensor, **like).sum() for tensor in mapped])
    count = len(mappings(zero))
    return [
        o if not is_differentiable(o) or len(mappings(o)) == count else o + zero.to(o.device, o.dtype)
        for o in outputs
    ]


def _transposed(
    linear: Callable[..., list[torch.Tensor]], like: Sequence[torch.Tensor], tangents: list[Any]
) -> list[torch.Tensor | None]:
    """The transpose of a map from tensors like these, None for an integer one, applied to `tangents`."""
    floating = [is_differentiable(tensor) for tensor in like]
    if not (tangents and any(floating)):
        return [torch.zeros_like(tensor) if f else None for tensor, f in zip(like, floating, strict=True)]

    def function(*of_floating: torch.Tensor) -> list[torch.Tensor]:
        every = iter(of_floating)
        return linear(*[next(every) if f else None for f in floating])

    # Not at zero, which a rule may set apart, as one does that divides by its upstream gradient's length.
    tried = [u for u in _tried(like) if u is not None]
    pushed = iter(torch.func.vjp(function, *tried)[1](tangents))
    return [next(pushed) if f else None for f in floating]


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    """A dual number's value, which has no tangent at the level at which a `jvp` runs."""
    if torch.func.debug_unwrap(tensor, recurse=False).ndim > tensor.ndim:
        return _PrimalOfBatch.apply(tensor)
    return forward_ad.unpack_dual(tensor, level=0).primal


def _reaches_duals(name: str, rule: Callable[..., Any], residuals: Sequence[torch.Tensor]) -> bool:
    """Whether a dual number is behind an object, where no primal can be put in its place."""
    if forward_ad._current_level < 0:
        return False
    own = set(map(id, residuals))
    reached = [tensor for tensor in reachable_tensors(rule, TENSORS) if id(tensor) not in own]
    if any(map(is_of_level_within, reached)):
        # To run the function again here would put another tensor in its place, of which that level knows
        # nothing.
        raise NotImplementedError(
            message(
                name,
                "forward mode is taken of another derivative, and the rule reaches what that left in objects",
                required="a rule that closes over what it uses",
                got="an object, such as `self`, with tensors of the derivative within",
                fix="let the rule close over the tensor itself, or take both derivatives in reverse mode, "
                "as multigrad.hessian does",
            )
        )
    return any([forward_ad.unpack_dual(t, level=0).tangent is not None for t in reached])


class _PrimalOfBatch(torch.autograd.Function):
    """It tells vmap what PyTorch (2.13) does not: to unpack a batch of dual numbers."""

    @staticmethod
    def forward(tensor: torch.Tensor) -> NoReturn:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> NoReturn:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, dims: tuple[int, ...], tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return _primal(tensor), dims[0]


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


def _transformed_rule(ctx: Any, saved: Sequence[torch.Tensor]) -> Callable[..., Any]:
    found = ctx.found
    residuals = [saved[place] for place in found.places]
    rule = restore(found.template, residuals)
    if not found.opaque:
        return rule
    if found.standing and not found.dual:
        # A second run puts other tensors into the objects, which do not tell of it any more.
        found.dual = _reaches_duals(ctx.call.name, rule, residuals)
        if not found.dual:
            return rule
    # What the rule reaches through an object belongs to another level. It has its like in a second run.
    inputs, outputs, _ = found.parts(saved)
    others = len(inputs) + len(outputs)
    known = [slot for slot, place in enumerate(found.places) if place < others]
    template, again, own = run_again(ctx.call, found.back, len(residuals), inputs)
    again = with_history(residuals, again, known)
    require_alike(ctx.call, [*outputs, *residuals], [*own, *again])
    return restore(template, again)


def _pull_residuals(
    ctx: Any, saved: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None], by: Sequence[int]
) -> list[torch.Tensor]:
    """The gradients, with respect to the inputs `by`, of what the function computed on the way."""
    call, found = ctx.call, ctx.found
    inputs, residuals = found.parts(saved)[0], [saved[place] for place in found.places]
    wanted = [i for i, u in enumerate(upstream) if u is not None]
    slots = [found.places.index(found.inputs + found.outputs + i) for i in wanted]

    def run(*own: torch.Tensor) -> list[torch.Tensor]:
        every = list(inputs)
        for i, tensor in zip(by, own, strict=True):
            every[i] = tensor
        _, again, _ = run_again(call, found.back, len(residuals), every)
        moved = [slot for slot in slots if again[slot].requires_grad]
        require_alike(call, [residuals[slot] for slot in moved], [again[slot] for slot in moved])
        return [again[slot] for slot in slots]

    return list(torch.func.vjp(run, *[inputs[i] for i in by])[1]([upstream[i] for i in wanted]))
