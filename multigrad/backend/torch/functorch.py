"""The `autograd.Function` of a call under torch.func and in forward mode."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from multigrad.backend.base import Call, Pullback, Run, Spec
from multigrad.backend.torch.eager import (
    dense_floating,
    is_alias,
    mark_integers,
    require_alike,
    run_again,
    with_history,
)
from multigrad.backend.torch.private import forward_ad, saved_tensor_hooks, set_forward_mode
from multigrad.backend.torch.state import (
    Autocast,
    active_vmaps,
    autocasting,
    current_autocast,
    is_empty,
    is_of_inner_level,
    unwrapped,
    vmaps_of,
)
from multigrad.backend.torch.tensors import TENSORS, distinct, is_differentiable, specs_of
from multigrad.core.closure import OTHER, restore
from multigrad.core.errors import TouchedVariable, message
from multigrad.core.reachable import reachable_tensors


def apply_transforming(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    run = _Run()
    if not (call.has_objects() or call.touches_variables() or next(_reachable(call), None) is not None):
        try:
            outputs = _Transformed.apply(call, run, *tensors)
            return run.pullback.output.join(outputs[: run.outputs])
        except TouchedVariable:
            call.note_touched()
    # Other tensors that the function uses may be wrapped by a transform, so that they cannot be used inside
    # of the Function, or may require a gradient. So the function runs before, with recording, and its outputs
    # become those of the Function.
    first = call.run(tensors)
    outputs, rule, inputs, pullback = first.outputs, first.rule, first.inputs, first.pullback
    others = run.set(call, first)
    run.before = True
    detached = [output.detach() for output in outputs]
    active = active_vmaps()
    reached = reachable_tensors(rule, TENSORS) if run.opaque and active else ()
    # A tensor that is mapped by a vmap that has ended counts as unmapped.
    mapped = [tensor for tensor in reached if active >= set(vmaps_of(tensor)) > set()]
    marks = [torch.zeros_like(tensor, dtype=torch.float32).sum() for tensor in mapped]
    outputs = _Transformed.apply(call, run, *inputs, *detached, *others, *marks)
    return pullback.output.join(outputs[: run.outputs])


def is_unaffected(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call inside of a vmap uses no mapped tensor, and can run as if outside of the vmap.

    This is required in a checkpoint, which runs an op again in the backward pass. The backward pass may be
    mapped (for a Jacobian) although the op is not. The tensors that the op saves then replace those of the
    first run, in the same order.
    """
    if forward_ad._current_level >= 0 or call.is_in_scope():
        return False
    # An object may hold mapped tensors, except in a checkpoint, which sets saved-tensor hooks.
    if call.has_objects() and saved_tensor_hooks(False) is None:
        return False
    used = [*tensors, *_reachable(call)]
    # Other transforms wrap the result of every operation, so try one.
    return not any(map(_is_wrapped, [*used, *[tensor.detach() for tensor in used[:1]]]))


def _reachable(call: Call) -> Iterator[torch.Tensor]:
    """Yield the tensors that the function can use, apart from its arguments.

    They include globals that the function names, because a gradient penalty may use global weights.
    """
    return reachable_tensors(call.f, TENSORS, with_globals=True)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


class _Run:
    """The result of a run that is the same at every level of transforms."""

    autocast: "Autocast"
    before = False
    """Whether the function ran before the Function. The arguments of the Function are then the inputs,
    outputs, other residuals, and marks: zeros that are mapped like the tensors that the rule reaches through
    objects."""
    pullback: Pullback
    dual = False
    """Whether the rule reaches a tensor with a forward-mode tangent through an object."""
    inputs: int
    opaque: bool
    outputs: int
    indices: list[int]
    """The index of each residual among the inputs, the outputs and the other residuals."""
    specs: list[Spec | None]
    template: Any

    def set(self, call: Call, run: Run) -> list[torch.Tensor]:
        """Set all attributes, and return the residuals that are neither inputs nor outputs."""
        run.lift(call.f)
        self.pullback, self.template, self.opaque = run.pullback, run.template, run.is_opaque
        self.autocast, self.specs = current_autocast(), specs_of(run.inputs)
        self.inputs, self.outputs = len(run.inputs), len(run.outputs)
        pairs = list(zip(run.residuals, run.roles, strict=True))
        others = list({id(residual): residual for residual, role in pairs if role == OTHER}.values())
        indices = {id(other): self.inputs + self.outputs + i for i, other in enumerate(others)}
        self.indices = [indices[id(residual)] if role == OTHER else role for residual, role in pairs]
        return others

    def parts(self, saved: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """Return the inputs, the outputs and the other residuals."""
        start, end = self.inputs, self.inputs + self.outputs
        return saved[:start], saved[start:end], saved[end:]


class _Transformed(torch.autograd.Function):
    """A Function in the form that transforms require. Its residuals are outputs, too.

    The derivative of a residual goes through the function, which runs again for it. In reverse mode this
    happens only in derivatives of the gradient.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, run: _Run, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if run.before:
            results = tensors[run.inputs : run.inputs + run.outputs]
        else:
            tensors = tuple(distinct(tensors))
            first = call.run(tensors, strict=True)
            results = (*first.outputs, *run.set(call, first))
        mapped = _mapped_alike(results, tensors)
        # In forward mode, PyTorch requires the tangent of a view to be a view. So no output is a view of an
        # input.
        return tuple([o.clone() if is_alias(o, tensors) else o.detach() for o in mapped])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.call, ctx.run, *tensors = inputs
        count = ctx.run.inputs
        saved = (*tensors[:count], *output, *tensors[count + ctx.run.outputs :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)  # None for outputs and residuals that are not differentiated
        mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run, all_needed = ctx.run, ctx.needs_input_grad[2:]
        saved = unwrapped(ctx.saved_tensors)
        inputs, outputs, _ = run.parts(saved)
        needed = all_needed[: len(inputs)]
        gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
        with autocasting(run.autocast):
            of_outputs, of_residuals = upstream[: len(outputs)], upstream[len(outputs) :]
            if any([u is not None for u in of_outputs]):
                pairs = zip(of_outputs, outputs, strict=True)
                whole = [torch.zeros_like(o) if u is None else u for u, o in pairs]
                rule = _rule_of(ctx, saved)
                gradients = run.pullback.pull(rule, dense_floating(whole), needed, run.specs)
            if any([u is not None for u in of_residuals]):
                argnums = [i for i, need in enumerate(needed) if need]
                pulled = _pull_residuals(ctx, saved, of_residuals, argnums)
                more = dict(zip(argnums, pulled, strict=True))
                gradients = [_sum(gradient, more.get(i)) for i, gradient in enumerate(gradients)]
        return None, None, *gradients, *[None] * (len(all_needed) - len(inputs))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tangents of the outputs by the transpose of the rule, which must be linear."""
        run = ctx.run
        argnums = [i for i, tangent in enumerate(tangents[2 : 2 + run.inputs]) if tangent is not None]
        # PyTorch (2.13) disables forward mode here, at outer levels too, so that derivatives of tangents
        # would be zero. So enable it again.
        with set_forward_mode(True), autocasting(run.autocast):
            saved = list(map(_primal, ctx.saved_tensors))
            inputs, outputs, others = run.parts(saved)
            rule = _rule_of(ctx, saved)
            needed = [i in argnums for i in range(len(inputs))]

            def vjp(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                gradients = run.pullback.untraced.pull(rule, upstream, needed, run.specs)
                return [
                    torch.zeros_like(inputs[i]) if gradients[i] is None else gradients[i] for i in argnums
                ]

            input_tangents = [tangents[2 + i] for i in argnums]
            pushed = _transposed(vjp, outputs, input_tangents)
            if run.before:
                return tuple(pushed)

            def pull(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                return _pull_residuals(ctx, saved, upstream, argnums)

            return *pushed, *_transposed(pull, others, input_tangents)


def _trials(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return upstream gradients with which a rule can be checked."""
    return [_trial(output) if is_differentiable(output) else None for output in outputs]


def _trial(output: torch.Tensor) -> torch.Tensor:
    if is_empty(output):
        return torch.ones_like(output)  # its sizes may be symbols
    angles = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    return angles.cos().to(output.dtype).reshape(output.shape)


@torch.compiler.disable
def _mapped_alike(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the outputs, mapped by each vmap that maps one of the sources.

    Otherwise the upstream gradient of an output that does not depend on a mapped source would be the sum over
    the batch, and the rule would return a gradient for the batch at each of its elements.
    """
    floating = [output for output in outputs if is_differentiable(output)]
    mapped = [tensor for tensor in sources if vmaps_of(tensor)]
    if not (floating and mapped):
        return outputs
    # Real, because converting a complex zero to a real dtype would warn.
    like = {"dtype": torch.float32, "device": floating[0].device}
    zero = sum([torch.zeros_like(tensor, **like).sum() for tensor in mapped])
    count = len(vmaps_of(zero))
    return [
        o if not is_differentiable(o) or len(vmaps_of(o)) == count else o + zero.to(o.device, o.dtype)
        for o in outputs
    ]


def _transposed(
    linear: Callable[..., list[torch.Tensor]], like: Sequence[torch.Tensor], tangents: list[Any]
) -> list[torch.Tensor | None]:
    """Return the transpose of a linear function of tensors like these, applied to `tangents`.

    The function gets None for integer tensors, and the result has None for them.
    """
    floating = [is_differentiable(tensor) for tensor in like]
    if not (tangents and any(floating)):
        return [torch.zeros_like(tensor) if f else None for tensor, f in zip(like, floating, strict=True)]

    def function(*upstream: torch.Tensor) -> list[torch.Tensor]:
        remaining = iter(upstream)
        return linear(*[next(remaining) if f else None for f in floating])

    # Not at zero, where a rule that divides by the norm of its upstream gradient is not differentiable.
    trials = [u for u in _trials(like) if u is not None]
    pushed = iter(torch.func.vjp(function, *trials)[1](tangents))
    return [next(pushed) if f else None for f in floating]


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    """Return the primal of a dual number at the level at which a `jvp` runs."""
    if torch.func.debug_unwrap(tensor, recurse=False).ndim > tensor.ndim:
        return _PrimalOfBatch.apply(tensor)
    return forward_ad.unpack_dual(tensor, level=0).primal


def _reaches_duals(name: str, rule: Callable[..., Any], residuals: Sequence[torch.Tensor]) -> bool:
    """Return whether the rule reaches a dual number in an object, which cannot be replaced by its primal."""
    if forward_ad._current_level < 0:
        return False
    residual_ids = set(map(id, residuals))
    reached = [tensor for tensor in reachable_tensors(rule, TENSORS) if id(tensor) not in residual_ids]
    if any(map(is_of_inner_level, reached)):
        # The inner derivative does not know the tensor that running the function again would set on the
        # object.
        raise NotImplementedError(
            message(
                name,
                "the rule uses tensors of an inner derivative in an object, under forward mode",
                required="a rule that closes over the tensors that it uses",
                got="an object, such as `self`, that holds tensors of the inner derivative",
                fix="let the rule close over the tensor, or take both derivatives in reverse mode, as "
                "multigrad.hessian does",
                see="pytorch#nested-forward-mode",
            )
        )
    return any([forward_ad.unpack_dual(t, level=0).tangent is not None for t in reached])


class _PrimalOfBatch(torch.autograd.Function):
    """The vmap rule of unpacking a dual number, which PyTorch (2.13) does not have."""

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


def _rule_of(ctx: Any, saved: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return the rule with the saved residuals, or the rule of a second run if it uses objects."""
    run = ctx.run
    residuals = [saved[index] for index in run.indices]
    rule = restore(run.template, residuals)
    if not run.opaque:
        return rule
    if run.before and not run.dual:
        # Remembered, because a second run sets other tensors on the objects, which are no dual numbers.
        run.dual = _reaches_duals(ctx.call.name, rule, residuals)
        if not run.dual:
            return rule
    # Tensors that the rule reaches through an object belong to another level. A second run makes new ones.
    inputs, outputs, _ = run.parts(saved)
    first_other = len(inputs) + len(outputs)
    keep = [slot for slot, index in enumerate(run.indices) if index < first_other]
    template, second, second_outputs = run_again(ctx.call, run.pullback, len(residuals), inputs)
    second = with_history(residuals, second, keep)
    require_alike(ctx.call, [*outputs, *residuals], [*second_outputs, *second])
    return restore(template, second)


def _pull_residuals(
    ctx: Any, saved: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None], argnums: Sequence[int]
) -> list[torch.Tensor]:
    """Return the gradients of intermediate results with respect to the inputs `argnums`."""
    call, run = ctx.call, ctx.run
    inputs, residuals = run.parts(saved)[0], [saved[index] for index in run.indices]
    wanted = [i for i, u in enumerate(upstream) if u is not None]
    slots = [run.indices.index(run.inputs + run.outputs + i) for i in wanted]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        new_inputs = list(inputs)
        for i, tensor in zip(argnums, tensors, strict=True):
            new_inputs[i] = tensor
        _, second, _ = run_again(call, run.pullback, len(residuals), new_inputs)
        recorded = [slot for slot in slots if second[slot].requires_grad]
        require_alike(call, [residuals[slot] for slot in recorded], [second[slot] for slot in recorded])
        return [second[slot] for slot in slots]

    return list(torch.func.vjp(function, *[inputs[i] for i in argnums])[1]([upstream[i] for i in wanted]))
