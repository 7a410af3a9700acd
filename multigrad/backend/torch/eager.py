"""The `autograd.Function` of a call in eager code."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import is_grad_enabled

from multigrad.backend.base import Call, Rule, Run
from multigrad.backend.torch import private
from multigrad.backend.torch.state import (
    IN_THREAD,
    current_autocast,
    fork_random_state,
    is_compiling,
    is_transforming,
    is_unreadable,
    no_transforms,
    restore_autocast,
    vmaps_of,
    without_wrappers,
)
from multigrad.backend.torch.tensors import FLOATING, TENSORS, changed_upstream, is_differentiable, specs_of
from multigrad.common.closure import OTHER, lift
from multigrad.common.errors import closed_over_error, held_error, message


def apply_eagerly(call: Call, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    inputs = list(tensors)
    if is_grad_enabled():
        # The tensors are detached, so an output that still requires a gradient got it from a tensor that the
        # function closes over. A gradient in the function is an outermost one (see `outermost_derivative`,
        # which takes 2 us here).
        stripped = [t.detach() if t.requires_grad else t for t in tensors]
        depth, IN_THREAD.depth = IN_THREAD.depth, 0
        try:
            run = call.run(stripped, torch.Tensor.detach)
        finally:
            IN_THREAD.depth = depth
        inputs += run.originals
        for tensor in (*inputs, *run.outputs):
            if tensor.requires_grad:
                return _tie(call, run, inputs)
    else:
        run = call.run(tensors)
    # An output that is an input is copied as a view. The rule of an outer op would take it for the input.
    return [o.view_as(o) if any([o is t for t in run.inputs]) else o for o in run.outputs]


class _NodeState(NamedTuple):
    """The state of a node that is not a saved tensor."""

    rule: Rule
    slots: Sequence[int] | None
    """For each residual the index of its saved tensor. None if no residual occurs twice."""
    autocast: Any
    call: Call | None
    """The call, whose function runs again for a second derivative. None if it need not run again."""
    computed: bool
    """Whether a residual is an intermediate result."""
    closed_over: Sequence[Any]
    """The nodes of residuals that were computed outside of the op with a history. They must stay alive."""


class _Node(torch.autograd.Function):
    """The node of a call, whose function has run on tensors without a history."""

    @staticmethod
    def forward(ctx: Any, call: Any, run: Run, *tensors: torch.Tensor) -> Any:
        inputs = tensors[: len(run.inputs)]  # the gradients of the others raise errors
        outputs = _new_outputs(run, inputs)
        residuals, closed_over, computed = _residuals_to_save(call, run, inputs, outputs)
        slots = None
        if len(residuals) > 1:
            distinct = dict(zip(map(id, residuals), residuals, strict=True))
            if len(distinct) < len(residuals):
                # A residual that occurs twice, such as a weight, is saved once: hooks may copy each.
                slots = list(map(list(distinct).index, map(id, residuals)))
                residuals = list(distinct.values())
        # PyTorch restores saved inputs and outputs with their history. For intermediate results, a second
        # derivative runs the function again on the inputs.
        rule = run.rule
        rule.specs = specs_of(inputs)
        if not (computed or rule.is_opaque):
            ctx.save_for_backward(*residuals)
            call = None
        elif call.higher_order:
            ctx.save_for_backward(*residuals, *inputs)
        else:
            ctx.save_for_backward(*residuals)
            ctx.anchors = _anchors([*inputs, *lift(call.f, TENSORS)[0]])
        autocast = current_autocast() if private.is_autocast_anywhere() else None
        ctx.multigrad = _NodeState(rule, slots, autocast, call, computed, closed_over)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    @private.skip_frames
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        rule, slots, autocast, call, computed, _ = ctx.multigrad
        if (autocast or private.is_autocast_anywhere()) and autocast != current_autocast():
            with restore_autocast(autocast):
                return _Node.backward(ctx, *upstream)
        saved = ctx.saved_tensors
        if slots is not None:
            saved = *[saved[slot] for slot in slots], *saved[max(slots) + 1 :]
        if len(upstream) > 1 or (upstream[0] is not None and upstream[0].is_sparse):
            upstream = dense_floating(upstream)
        end = 2 + len(rule.specs)
        needed = ctx.needs_input_grad[2:end]
        no_gradients = [None] * (len(ctx.needs_input_grad) - end)
        residuals = saved
        if call is not None and is_grad_enabled():
            if not call.higher_order:
                with torch.no_grad():
                    gradients = rule.pull(saved, upstream, needed)
                error = _only_first_order(call)
                sources = [t for t in (*ctx.anchors, *saved, *upstream) if t is not None and t.requires_grad]
                return None, None, *refuse(gradients, error, *sources), *no_gradients
            residuals = _residuals_with_history(call, rule, saved, computed)
        versions = private.versions_of(upstream)
        gradients = rule.pull(residuals, upstream, needed)
        if private.versions_of(upstream) != versions:
            raise changed_upstream(rule.name)
        return None, None, *gradients, *no_gradients


def _residuals_with_history(
    call: Call, rule: Rule, saved: Sequence[torch.Tensor], computed: bool
) -> Sequence[torch.Tensor]:
    """Return the residuals for a second derivative. `saved` are those of the call, and its inputs."""
    count = len(saved) - len(rule.specs)
    residuals, inputs, before = saved[:count], saved[count:], rule.held()
    if not (computed or before):
        return residuals
    if not computed:  # the second run only shows which tensors the function stores
        inputs = [tensor.detach() for tensor in inputs]
    with fork_random_state():
        second = rerun(call, rule, count, inputs)
    if second.rule.holds_more_than(before):
        raise TypeError(held_error(call.name))
    if not computed:
        return residuals
    recorded = with_history(residuals, second.residuals, rule.roles)
    require_alike(call, residuals, recorded)
    return recorded


class _NamedApplies(dict[str, Any]):
    """For each name of an op, `apply` of a node with this name, which PyTorch's anomaly mode prints."""

    def __missing__(self, name: str) -> Any:
        self[name] = apply = private.direct_apply(type(name, (_Node,), {}))
        return apply


_APPLIES = _NamedApplies()


def _tie(call: Call, run: Run, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the outputs of a run, whose derivative with respect to its inputs is the rule.

    `inputs` are those of the run, with their history. An output that has a history depends on another tensor.
    """
    run.lift(call.f)
    closed_over_outputs = [output for output in run.outputs if output.requires_grad]
    if closed_over_outputs and not call.answers_for_outer_rule(inputs):
        error = closed_over_error(call.name, call.closed_over_path(lambda tensor: tensor.requires_grad))
        inputs = [*inputs, *refused_parts(closed_over_outputs, error)]
    outputs = _APPLIES[call.name](call, run, *inputs)
    return outputs if type(outputs) is tuple else (outputs,)


def _new_outputs(run: Run, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensors for the outputs.

    They are new because the function may return a constant, an input, or one tensor twice. An alias of an
    input becomes a view of the input with a history, so that PyTorch handles in-place changes.
    """
    outputs = []
    for output in run.outputs:
        if private.is_view(output) or any([output is x for x in run.inputs]):
            for stripped, x in zip(run.inputs, inputs, strict=True):
                if private.base_of(output) is private.base_of(stripped) and output.dtype == x.dtype:
                    output = x.as_strided(output.shape, output.stride(), output.storage_offset())
                    break
            else:
                output = output.view_as(output)
            outputs.append(output)
        else:
            outputs.append(output.detach())
    return outputs


def _residuals_to_save(
    call: Call, run: Run, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Sequence[Any], bool]:
    """Return the residuals, with these inputs and outputs in place of those of the run.

    Returns:
        the residuals, the nodes of those that have a history of their own, and whether a residual is an
        intermediate result.
    """
    residuals: list[torch.Tensor] = []
    closed_over: list[Any] = []
    computed, count = False, len(inputs)
    for residual, role in zip(run.residuals, run.rule.roles, strict=True):
        if 0 <= role < count:
            residual = inputs[role]
        elif role != OTHER:
            residual = outputs[role - count]
        elif has_node(residual):
            closed_over.append(node_of(residual))
            computed = computed or not any([residual is tensor for tensor in lift(call.f, TENSORS)[0]])
        else:
            computed = computed or FLOATING[residual.dtype]
        residuals.append(residual)
    return residuals, closed_over, computed


def has_node(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a history.

    Some tensors require a gradient and have no node: a view that was made without recording, of a tensor that
    requires a gradient, and a tensor of a transform of torch.func that has ended.
    """
    if not tensor.requires_grad or tensor.grad_fn is not None:
        return tensor.requires_grad
    return not private.is_view(tensor) and torch.func.debug_unwrap(tensor, recurse=False) is tensor


def rerun(call: Call, first: Rule, count: int, tensors: Sequence[torch.Tensor]) -> Run:
    """Run the function again with recording, because its first run was not recorded.

    Its rule must have as many residuals as the rule of the first run: `count`.
    """
    run = call.rerun(tensors, first)
    if len(run.residuals) != count:
        raise _not_repeatable(call)
    return run


def with_history(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], roles: Sequence[int]
) -> list[torch.Tensor]:
    """Return the intermediate results of the second run, and the other residuals of the first run.

    Inputs and outputs have a history in the first run. An intermediate result that depends on no input, such
    as a mask, has none in either run.
    """
    chosen = zip(first, second, roles, strict=True)
    return [new if role == OTHER and new.requires_grad else old for old, new, role in chosen]


def _only_first_order(call: Call) -> str:
    return message(
        call.name,
        "the gradient cannot be differentiated again",
        required="an op with higher_order=True",
        got="higher_order=False",
        fix="omit higher_order; the op then keeps its inputs in memory",
        see="limits#second-derivatives",
    )


def require_alike(call: Call, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Raise RuntimeError unless two runs of a function gave equal tensors."""
    if not all(map(_alike, first, second)):
        raise _not_repeatable(call)


def _not_repeatable(call: Call) -> RuntimeError:
    return RuntimeError(
        message(
            call.name,
            "the function returned different values when it ran again for a second derivative",
            required="a function that returns the same values for the same arguments",
            got="different outputs or residuals",
            fix="draw random numbers outside of the function, and pass them and other state as arguments",
            see="limits#second-derivatives",
        )
    )


def _alike(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two tensors are equal up to rounding."""
    if first is None or second is None or first is second:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if is_unreadable(first):
        return True
    if hasattr(first, "to_local"):  # a DTensor, of which each process compares its shard
        first, second = first.to_local(), second.redistribute(placements=first.placements).to_local()
    levels = sorted({level for tensor in (first, second) for level, _ in vmaps_of(tensor)})
    with no_transforms():
        first, second = torch.broadcast_tensors(
            without_wrappers(first, levels), without_wrappers(second, levels)
        )
        if not is_differentiable(first) or first.numel() == 0:
            return torch.equal(first, second)
        rounding = min(1e3 * torch.finfo(first.dtype).eps, 0.1)
        if first.dtype.itemsize == 1:  # PyTorch has few operations on such a dtype
            first, second = first.float(), second.float()
        scale = first.abs().nan_to_num(posinf=0.0).max().item()
        return torch.allclose(first, second, rtol=rounding, atol=rounding * scale, equal_nan=True)


def mark_integers(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Mark the integer outputs of a Function as not differentiable."""
    ctx.mark_non_differentiable(*[o for o in outputs if not FLOATING[o.dtype]])


def dense_floating(upstream: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the upstream gradients for a rule: dense tensors, and None for integer outputs.

    PyTorch passes zeros for integer outputs. It passes a sparse gradient if the output was used in a lookup
    such as `torch.nn.Embedding(sparse=True)`. Keras cannot compute with it.
    """
    return tuple(
        [None if u is None or not FLOATING[u.dtype] else u.to_dense() if u.is_sparse else u for u in upstream]
    )


_COMPILED = message(
    "a compiled function",
    "the gradient of a compiled function cannot be differentiated in PyTorch",
    required="both derivatives in one compiled function, or a function that is not compiled",
    got="a derivative of the gradient of a result of torch.compile or multigrad.jit",
    fix="compile the outermost function, such as the training step, and compute both derivatives in it, by "
    "multigrad.grad in place of backward()",
    see="limits#compile",
)


class _NotDifferentiable(torch.autograd.Function):
    """A Function that raises an error when it is differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(error: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([result.detach() for result in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.error = inputs[0]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> NoReturn:
        raise RuntimeError(ctx.error)


_refuse_eagerly = private.direct_apply(_NotDifferentiable)


@private.skip_frames
def refuse(results: Sequence[torch.Tensor | None], error: str, *sources: torch.Tensor) -> list[Any]:
    """Return the results, so that differentiating them with respect to a source raises the error."""
    tensors = [tensor for tensor in results if tensor is not None]
    if not tensors:
        return list(results)
    apply = _NotDifferentiable.apply if is_compiling() or is_transforming() else _refuse_eagerly
    refused = iter(apply(error, len(tensors), *tensors, *sources))
    return [None if result is None else next(refused) for result in results]


def refused_parts(outputs: Sequence[torch.Tensor], error: str) -> list[torch.Tensor]:
    """Return an empty part of each output. Differentiating it raises the error."""
    return refuse([output.detach().flatten()[:0] for output in outputs], error, *outputs)


def refuse_compiled(
    tensors: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return tensors of a compiled function, so that differentiating them with respect to a source raises.

    They keep their own history: a gradient can be differentiated with respect to its upstream gradient.
    """
    zeros = refuse([None if t is None else torch.zeros_like(t) for t in tensors], _COMPILED, *sources)
    return [None if t is None else t + zero for t, zero in zip(tensors, zeros, strict=True)]


def _anchors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return empty tensors with the history of these tensors, which do not keep their values alive."""
    with torch.enable_grad():
        return [tensor.reshape(-1)[:0].clone() for tensor in tensors if tensor.requires_grad]


def node_of(tensor: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(tensor).node


def nodes_from(nodes: list[Any], ends: Collection[Any] = ()) -> set[Any]:
    """Return these nodes and the nodes on which they depend, but none beyond `ends`."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend([parent for parent, _ in node.next_functions if node not in ends])
    return seen
