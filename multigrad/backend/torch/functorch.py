"""The `autograd.Function` of a call under torch.func and in forward mode."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from multigrad.backend.base import Call, Run
from multigrad.backend.torch import private
from multigrad.backend.torch.eager import dense_floating, mark_integers, refused_parts, require_alike, rerun
from multigrad.backend.torch.state import (
    active_vmaps,
    current_autocast,
    is_empty,
    is_of_ended_transform,
    outermost_derivative,
    restore_autocast,
    unwrap_ended,
    vmaps_of,
)
from multigrad.backend.torch.tensors import TENSORS, changed_upstream, is_differentiable, specs_of
from multigrad.common.closure import residuals_in
from multigrad.common.errors import closed_over_error, held_error
from multigrad.common.reachable import reachable_tensors


def apply_transforming(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Run the function, and return its outputs from a Function whose derivative is the rule."""
    # Before the function runs, which may store intermediate results.
    used, before = list(_tensors_in_reach(call)), call.held()
    run, outputs, refused = _run_stripped(call, tensors, used)
    state, others = _FunctorchState(call, run), run.other_residuals()
    has_one, keys = _has_one_derivative(run, used), [transform.key() for transform in private.transforms()]
    is_mapped_inside = private.VMAP in keys[-1:] and set(keys) != {private.VMAP}
    # A vmap that maps no input, but a tensor in an object, does not map the outputs.
    unmapped = active_vmaps().difference(*map(vmaps_of, run.inputs))
    mapped = [part for part in before if TENSORS[type(part)] and not unmapped.isdisjoint(vmaps_of(part))]
    if not has_one or is_mapped_inside or mapped:
        before = [part for part in before if not any([part is other for other in mapped])]
        if state.rule.holds_more_than(before) or any(map(is_of_ended_transform, others)):
            raise TypeError(held_error(call.name))
    is_computed = any([is_differentiable(other) and not _is_in(other, used) for other in others])
    # A first derivative in forward mode needs no tangents of intermediate results. Those that the function
    # recorded belong to a pullback, which is transposed.
    is_alone = has_one and private.forward_level() >= 0 and not any(map(_is_tracked, others))
    if is_computed and not is_alone:
        # Those that also depend on tensors that the function closes over.
        if any(map(_is_tracked, others)) or any(map(_is_wrapped, used)):
            run = call.rerun(run.inputs, run.rule)  # on inputs with history
            state, others = _FunctorchState(call, run), run.other_residuals()
            if any(map(is_of_ended_transform, others)):
                raise TypeError(held_error(call.name))
        else:
            others = _Intermediates.apply(state, *run.inputs, *others)
    return _FunctorchNode.apply(state, *run.inputs, *outputs, *others, *refused)


def _has_one_derivative(run: Run, used: Sequence[torch.Tensor]) -> bool:
    """Return whether at most one derivative is taken around the call.

    `used` are the tensors that the function could use before it ran.
    """
    keys = [transform.key() for transform in private.transforms() if transform.key() != private.VMAP]
    if len(keys) + (private.forward_level() >= 0 and private.JVP not in keys) > 1:
        return False
    values = [torch.func.debug_unwrap(tensor, recurse=True) for tensor in (*run.inputs, *used)]
    return not (torch.is_grad_enabled() and any([value.requires_grad for value in values]))


def _run_stripped(
    call: Call, tensors: Sequence[torch.Tensor], used: Sequence[torch.Tensor]
) -> tuple[Run, list[torch.Tensor], list[torch.Tensor]]:
    """Run the function on tensors without history, as a hand-written Function does.

    If no transform wraps a tensor that the function closes over, and no vmap maps an argument, the tensors
    have no wrappers of transforms, so that the function can use NumPy.

    Returns:
        the run, its outputs without history, and empty tensors whose derivative raises an error: one for each
        output that has a history, which came by another way than the arguments.
    """
    strip, context = torch.Tensor.detach, contextlib.nullcontext()
    mapped = active_vmaps() and (call.is_in_scope() or any(map(vmaps_of, tensors)))
    if not (mapped or any(map(_is_wrapped, used))):
        strip, context = _without_transforms, private.untransformed()
    with torch.enable_grad(), context, outermost_derivative():
        run = call.run(list(map(strip, tensors)), strip)
        run.lift(call.f)
    run.inputs = [*tensors, *run.originals]
    outputs = [output.detach() for output in run.outputs]
    tracked = [output for output in run.outputs if _is_tracked(output)]
    if not tracked or call.answers_for_outer_rule(run.inputs):
        return run, outputs, []
    error = closed_over_error(call.name, call.closed_over_path(_is_tracked))
    if any(map(_has_tangent, tracked)):
        raise TypeError(error)
    return run, outputs, refused_parts(tracked, error)


def _without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    return torch.func.debug_unwrap(tensor, recurse=True).detach()


def _is_tracked(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a history or a tangent at any level of the transforms."""
    inner = torch.func.debug_unwrap(tensor, recurse=False)
    is_mapped = inner.ndim > tensor.ndim  # PyTorch (2.13) cannot unpack a dual number in a vmap
    is_tracked = tensor.requires_grad or (not is_mapped and _has_tangent(tensor))
    return is_tracked or (inner is not tensor and _is_tracked(inner))


def _is_in(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any([tensor is other for other in tensors])


def _has_tangent(tensor: torch.Tensor) -> bool:
    return private.forward_level() >= 0 and forward_ad.unpack_dual(tensor, level=0).tangent is not None


def is_unaffected(call: Call, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call inside of a vmap uses no mapped tensor, and can run as if outside of the vmap.

    This is required in a checkpoint, which runs an op again in the backward pass. The backward pass may be
    mapped (for a Jacobian) although the op is not. The tensors that the op saves then replace those of the
    first run, in the same order.
    """
    if private.forward_level() >= 0 or call.is_in_scope():
        return False
    used = [*tensors, *_tensors_in_reach(call)]
    # Other transforms wrap the result of every operation, so try one.
    return not any(map(_is_wrapped, [*used, *[tensor.detach() for tensor in used[:1]]]))


def _tensors_in_reach(call: Call) -> Iterator[torch.Tensor]:
    """Yield the tensors that the function can use, apart from the tensors among its arguments."""
    for root in (call.f, *call.objects()):
        yield from reachable_tensors(root, TENSORS, (torch.nn.Module,))


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


class _FunctorchState:
    """The state of a call that is the same at every level of transforms."""

    def __init__(self, call: Call, run: Run) -> None:
        self.call, self.rule, self.autocast = call, run.rule, current_autocast()
        self.rule.specs = specs_of(run.inputs)
        self.inputs, self.outputs = len(run.inputs), len(run.outputs)

    def residuals(self, saved: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the residuals among the inputs, the outputs and the other residuals."""
        return residuals_in(self.rule.roles, saved, saved[self.inputs + self.outputs :])


class _FunctorchNode(torch.autograd.Function):
    """A Function in the form that transforms require.

    Its arguments are the inputs, the outputs, the other residuals, and empty tensors whose derivative raises
    an error. The outputs depend on the inputs by the rule, and on no other argument.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(state: _FunctorchState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = _map_alike(tensors[state.inputs : state.inputs + state.outputs], tensors)
        # Copies: in forward mode, PyTorch requires the tangent of a view to be a view.
        return tuple([output.clone() for output in outputs])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.state, *tensors = inputs
        count = ctx.state.inputs
        saved = (*tensors[:count], *output, *tensors[count + len(output) :])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)  # None for outputs that are not differentiated
        mark_integers(ctx, output)

    @staticmethod
    @private.skip_frames
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        state = ctx.state
        gradients: Sequence[torch.Tensor | None] = [None] * state.inputs
        if any([u is not None for u in upstream]):
            with restore_autocast(state.autocast):
                saved = unwrap_ended(ctx.saved_tensors)
                pairs = zip(upstream, saved[state.inputs :], strict=False)
                whole = [torch.zeros_like(output) if u is None else u for u, output in pairs]
                needed = ctx.needs_input_grad[1 : 1 + state.inputs]
                versions = private.versions_of(upstream)
                gradients = state.rule.pull(state.residuals(saved), dense_floating(whole), needed)
                if private.versions_of(upstream) != versions:
                    raise changed_upstream(state.call.name)
        return None, *gradients, *[None] * (len(ctx.needs_input_grad) - 1 - state.inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tangents of the outputs by the transpose of the rule, which must be linear."""
        state = ctx.state
        of_inputs = tangents[1 : 1 + state.inputs]
        needed = [tangent is not None for tangent in of_inputs]
        # PyTorch (2.13) disables forward mode here, at outer levels too, so that derivatives of tangents
        # would be zero. So enable it again.
        with private.set_forward_mode(True), restore_autocast(state.autocast):
            saved = list(map(_primal, ctx.saved_tensors))
            residuals = state.residuals(saved)

            def vjp(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                gradients = state.rule.pull(residuals, upstream, needed, transposed=True)
                triples = zip(gradients, saved, needed, strict=False)
                return [torch.zeros_like(x) if g is None else g for g, x, need in triples if need]

            outputs = saved[state.inputs : state.inputs + state.outputs]
            return tuple(_transpose(vjp, outputs, [t for t in of_inputs if t is not None]))


def _trial(output: torch.Tensor) -> torch.Tensor:
    """Return an upstream gradient with which a rule can be called."""
    if is_empty(output):
        return torch.ones_like(output)  # its sizes may be symbols
    angles = torch.arange(output.numel(), dtype=torch.float32, device=output.device)
    return angles.cos().to(output.dtype).reshape(output.shape)


class _Intermediates(torch.autograd.Function):
    """Gives a history to intermediate results, which were computed without one.

    Their derivative goes through the function, which runs again for it. In reverse mode this happens only in
    derivatives of the gradient. The arguments are the inputs and the intermediate results.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(state: _FunctorchState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.clone() for tensor in _map_alike(tensors[state.inputs :], tensors)])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.state, *tensors = inputs
        saved = (*tensors[: ctx.state.inputs], *output)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)
        ctx.set_materialize_grads(False)
        mark_integers(ctx, output)

    @staticmethod
    @private.skip_frames
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        state = ctx.state
        gradients: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        if any([u is not None for u in upstream]):
            argnums = [i for i, need in enumerate(ctx.needs_input_grad[1 : 1 + state.inputs]) if need]
            with restore_autocast(state.autocast):
                pulled = _pull_intermediates(state, unwrap_ended(ctx.saved_tensors), argnums, upstream)
            for i, gradient in zip(argnums, pulled, strict=True):
                gradients[1 + i] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        state = ctx.state
        of_inputs = tangents[1 : 1 + state.inputs]
        argnums = [i for i, tangent in enumerate(of_inputs) if tangent is not None]
        with private.set_forward_mode(True), restore_autocast(state.autocast):
            saved = list(map(_primal, ctx.saved_tensors))

            def vjp(*upstream: torch.Tensor | None) -> list[torch.Tensor]:
                return _pull_intermediates(state, saved, argnums, upstream)

            return tuple(_transpose(vjp, saved[state.inputs :], [t for t in of_inputs if t is not None]))


def _pull_intermediates(
    state: _FunctorchState,
    saved: Sequence[torch.Tensor],
    argnums: Sequence[int],
    upstream: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Return the gradients of intermediate results with respect to the inputs `argnums`."""
    inputs, first = saved[: state.inputs], saved[state.inputs :]
    wanted = [i for i, u in enumerate(upstream) if u is not None]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        new_inputs = list(inputs)
        for i, tensor in zip(argnums, tensors, strict=True):
            new_inputs[i] = tensor
        second = rerun(state.call, state.rule, len(state.rule.roles), new_inputs).other_residuals()
        recorded = [i for i in wanted if second[i].requires_grad]
        require_alike(state.call, [first[i] for i in recorded], [second[i] for i in recorded])
        return [second[i] for i in wanted]

    return list(torch.func.vjp(function, *[inputs[i] for i in argnums])[1]([upstream[i] for i in wanted]))


@torch.compiler.disable
def _map_alike(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
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
    # With an axis, because PyTorch (2.13) cannot add 0-d tensors that are mapped over no elements.
    zero = torch.stack([torch.zeros_like(tensor, **like).sum() for tensor in mapped]).sum(0, keepdim=True)
    count = len(vmaps_of(zero))
    return [
        o
        if not is_differentiable(o) or len(vmaps_of(o)) == count
        else (o + zero.to(o.device, o.dtype)).reshape(o.shape)
        for o in outputs
    ]


def _transpose(
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
    trials = [_trial(tensor) for tensor, f in zip(like, floating, strict=True) if f]
    pushed = iter(torch.func.vjp(function, *trials)[1](tangents))
    return [next(pushed) if f else None for f in floating]


def _primal(tensor: torch.Tensor) -> torch.Tensor:
    """Return the primal of a dual number at the level at which a `jvp` runs."""
    if torch.func.debug_unwrap(tensor, recurse=False).ndim > tensor.ndim:
        return _PrimalOfBatch.apply(tensor)
    return forward_ad.unpack_dual(tensor, level=0).primal


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
