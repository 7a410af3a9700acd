"""Gradients of functions."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch.compiler import is_dynamo_compiling

from multigrad.backend.torch import jit_derivatives, private
from multigrad.backend.torch.eager import (
    has_node,
    node_of,
    nodes_from,
    refuse,
    refuse_compiled,
)
from multigrad.backend.torch.state import (
    IN_PIECES,
    IN_THREAD,
    is_compiling,
    is_empty,
    is_transforming,
    is_transforming_traced,
    no_transforms,
    vmaps_of,
)
from multigrad.common.errors import message
from multigrad.common.reachable import reachable_tensors
from multigrad.common.type_sets import TypeSet

_LEAVES = TypeSet(torch.Tensor, keras.Variable)

# In code that Dynamo compiles in pieces, it would compile the functions of this module, too, each for itself.
# `skip_frame` leaves the function of the user to it, if PyTorch can differentiate the result.


@private.skip_frame
def value_and_grad(
    function: Callable[..., tuple[torch.Tensor, Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any],
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    if _is_in_program():
        if IN_THREAD.mode == IN_PIECES and not jit_derivatives.is_differentiated():
            return _break_graph(function, tensors, variables)
        return jit_derivatives.value_and_grad(function, tensors, variables)
    if _needs_transform():
        tensor_function, with_aux = _with_tensor_aux(function)
        argnums = tuple(range(len(tensors)))
        gradients, (value, aux) = torch.func.grad_and_value(tensor_function, argnums, has_aux=True)(*tensors)
        return (value, with_aux(aux)), list(gradients)
    return _value_and_grad_by_backward_pass(function, tensors, variables)


@private.skip_frame
def _value_and_grad_by_backward_pass(
    function: Callable[..., tuple[torch.Tensor, Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any],
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    """Return the value and the gradients, which a backward pass computes."""
    recording = torch.is_grad_enabled()
    depth = IN_THREAD.depth
    IN_THREAD.depth = depth + 1
    inputs = _new_inputs(tensors, len(variables))
    try:
        with torch.enable_grad():
            # PyTorch (2.13) cannot differentiate the backward pass of a compiled function.
            value, aux = (_call_uncompiled if depth else _call)(function, inputs)
        weights = [tensor for tensor in tensors[len(tensors) - len(variables) :] if tensor.requires_grad]
        apart = _apart_from(weights, value)
        if not (inputs and value.requires_grad):
            return _map_tensors(apart, (value, aux)), [torch.zeros_like(t) for t in tensors]
        # Record the backward pass if a second derivative can follow: inside of another gradient, or if the
        # value depends on tensors with a history other than the variables.
        recorded = recording and (depth > 0 or _depends_on_others(value, [*inputs, *weights]))
        gradients = _backward(value, inputs, create_graph=recorded, materialize_grads=True)
        gradients = list(map(apart, gradients))
        if recorded:
            return _map_tensors(apart, (value, aux)), list(_refuse_in_programs(gradients, inputs, [value]))
        if recording and weights:
            gradients = refuse(gradients, _UNRECORDED, *weights)
        return _map_tensors(lambda tensor: apart(tensor.detach()), (value, aux)), list(gradients)
    finally:
        IN_THREAD.depth = depth
        _mark_ended(inputs)


def _apart_from(
    weights: Sequence[torch.Tensor], value: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that copies a tensor if it shares the memory of a weight, which a step changes.

    A result can be a view of a weight, and the gradient that a rule returns can be another weight. While a
    program is recorded, as when `value` is fake, nothing changes.
    """
    memory = set()
    if weights and not (is_compiling() or is_empty(value)):
        memory = {weight.untyped_storage().data_ptr() for weight in weights}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        is_dense = memory and tensor.layout is torch.strided
        return tensor.clone() if is_dense and tensor.untyped_storage().data_ptr() in memory else tensor

    return apart


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], structure: Any) -> Any:
    """Return a structure with `function(tensor)` for each of its tensors."""
    if type(structure) in (tuple, list):  # keras.tree takes 20 us here, a tenth of a small gradient
        return type(structure)([_map_tensors(function, part) for part in structure])
    return keras.tree.map_structure(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, structure
    )


_REASON = "a later piece may need the history of this derivative, which is in no graph"
_break_graph = torch.compiler.disable(_value_and_grad_by_backward_pass, recursive=False, reason=_REASON)


@private.skip_frame
def vjp(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any] = (),
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]:
    if _is_in_program():
        if IN_THREAD.mode == IN_PIECES:  # the pullback may be called in another piece, without the history
            return _break_graph_vjp(function, tensors, variables)
        return jit_derivatives.vjp(function, tensors)
    if _needs_transform():
        tensor_function, with_aux = _with_tensor_aux(lambda *inputs: _outputs_as_list(*function(*inputs)))
        outputs, transpose, aux = torch.func.vjp(tensor_function, *tensors, has_aux=True)
        return (outputs, with_aux(aux)), lambda upstream: transpose(list(upstream))
    return _vjp_by_backward_pass(function, tensors, variables)


@private.skip_frame
def _vjp_by_backward_pass(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any],
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]:
    """Return the outputs and their pullback, which a backward pass computes."""
    depth = IN_THREAD.depth
    IN_THREAD.depth = depth + 1
    inputs = _new_inputs(tensors)
    try:
        with torch.enable_grad():
            recorded, aux = _call_uncompiled(function, inputs)
    finally:
        IN_THREAD.depth = depth
        _mark_ended(inputs)
    weights = [tensor for tensor in tensors[len(tensors) - len(variables) :] if tensor.requires_grad]
    depends = any([_depends_on_others(output, [*inputs, *weights]) for output in recorded])
    keep_graph = torch.is_grad_enabled() and (depth > 0 or depends)
    # A new list in both cases, so that a rule that closes over the pullback has the same residuals again.
    outputs, aux = ([*recorded], aux) if keep_graph else _map_tensors(torch.Tensor.detach, [[*recorded], aux])

    def pullback(upstream: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        pairs = [(output, u) for output, u in zip(recorded, upstream, strict=True) if output.requires_grad]
        if not (pairs and inputs):
            return [torch.zeros_like(tensor) for tensor in tensors]
        # As above, or if the upstream gradients are differentiated, as in forward mode.
        again = depends or IN_THREAD.depth > 0 or any([u.requires_grad for u in upstream])
        again = again and torch.is_grad_enabled()
        values = [output for output, _ in pairs]
        gradients = _backward(
            values,
            inputs,
            [u for _, u in pairs],
            retain_graph=True,
            create_graph=again,
            materialize_grads=True,
        )
        if again:
            return _refuse_in_programs(gradients, inputs, values)
        return refuse(gradients, _UNRECORDED, *weights) if weights and torch.is_grad_enabled() else gradients

    breaks_graph = IN_THREAD.mode == IN_PIECES
    return (outputs, aux), torch.compiler.disable(pullback, reason=_REASON) if breaks_graph else pullback


_break_graph_vjp = torch.compiler.disable(_vjp_by_backward_pass, reason=_REASON)


@private.skip_frame
def vjp_at_once(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]],
    tensors: Sequence[torch.Tensor],
    variables: Sequence[Any] = (),
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[..., Any]]:
    in_graph = _is_in_program() and jit_derivatives.is_differentiated()
    return jit_derivatives.vjp(function, tensors) if in_graph else vjp(function, tensors, variables)


def vmap(
    function: Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    tensors: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    # The same random numbers for each element, as on the other backends.
    mapped = torch.func.vmap(function, out_dims=(0, None), randomness="same")
    results: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = mapped(*tensors)
    return results


def depends_on_element(result: torch.Tensor, elements: Sequence[torch.Tensor]) -> bool:
    return vmaps_of(elements[0])[0] in vmaps_of(result)


def while_loop(
    condition: Callable[..., torch.Tensor],
    body: Callable[..., Sequence[torch.Tensor]],
    carry: Sequence[torch.Tensor],
    limit: int,
) -> Sequence[torch.Tensor]:
    for _ in range(limit):
        active = condition(*carry)
        # The values in the wrappers of transforms: those of all elements of a vmap.
        with no_transforms():
            ended = not torch.func.debug_unwrap(active, recurse=True).any()
        if ended:
            break
        carry = [torch.where(active, new, old) for new, old in zip(body(*carry), carry, strict=True)]
    return carry


def solve(matrices: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # `torch.linalg.solve` raises an error for all matrices if one is singular.
    solved, info = torch.linalg.solve_ex(matrices, right)
    return torch.where(info[..., None, None] == 0, solved, torch.nan)


@private.skip_frame
def _is_in_program() -> bool:
    """Return whether Dynamo traces a function of `multigrad.jit`, outside of transforms."""
    return is_dynamo_compiling() and IN_THREAD.mode != "" and not is_transforming_traced()


@private.skip_frame
def _needs_transform() -> bool:
    """Return whether torch.func must take the derivative: inside of its transforms and in inference mode."""
    inside = is_transforming() or is_dynamo_compiling()
    return inside or torch.is_inference_mode_enabled()


def _outputs_as_list(outputs: Sequence[torch.Tensor], aux: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the outputs as a list. torch.func.vjp requires upstream gradients in the same structure."""
    return list(outputs), aux


class _SameMemory(torch.autograd.Function):
    """Returns an alias of a tensor that has its memory and its history, and is no view for PyTorch."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return upstream


_share_memory = private.direct_apply(_SameMemory)


@private.skip_frames
def _new_inputs(tensors: Sequence[torch.Tensor], shared: int = 0) -> list[torch.Tensor]:
    """Return new tensors with respect to which a derivative is taken. A tensor with a history keeps it.

    The last `shared` tensors are weights whose gradient is computed at once. A copy would take the memory of
    a model. Others with a history are copied, so that a change in place loses nothing. No new tensor is a
    view: compiled code (PyTorch 2.13 to 2.15) detaches views, so that a second derivative with respect to one
    would silently be zero. For other inputs it raises an error.
    """
    copies = [torch.clone] * (len(tensors) - shared) + [_share_memory] * shared
    with torch.enable_grad():
        pairs = zip(tensors, copies, strict=True)
        return [copy(t) if t.requires_grad else t.detach().requires_grad_() for t, copy in pairs]


@private.skip_frame
def _call(function: Callable[..., tuple[Any, Any]], inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Call the function. Raise if it changed an input, as its derivative would be that at the new value."""
    nodes = [tensor.grad_fn for tensor in inputs]
    result = function(*inputs)
    if any([tensor.grad_fn is not node for tensor, node in zip(inputs, nodes, strict=True)]):
        raise RuntimeError(_CHANGED)
    return result


@private.skip_frames
def _backward(*args: Any, **options: Any) -> Sequence[torch.Tensor]:
    """Return gradients. Dynamo compiles no part of the backward pass, such as a checkpoint's second run."""
    return torch.autograd.grad(*args, **options)


@private.skip_frames
def _call_uncompiled(
    function: Callable[..., tuple[Any, Any]], inputs: Sequence[torch.Tensor]
) -> tuple[Any, Any]:
    """Call the function, and let Dynamo compile no part of it."""
    return _call(function, inputs)


@private.skip_frames
def _mark_ended(inputs: Sequence[torch.Tensor]) -> None:
    """Mark the leaves of a derivative that has been taken. No second derivative is taken with respect to
    them.

    Before, one may be taken in another thread, whose depth is different.
    """
    for tensor in inputs:
        if tensor.is_leaf:
            tensor.multigrad_ended = True


def may_record(tensors: Sequence[torch.Tensor] | None = None) -> bool:
    if tensors is None:
        return True  # under `torch.no_grad` too: a checkpoint runs the code again with recording
    return torch.is_grad_enabled() and (is_transforming() or any([t.requires_grad for t in tensors]))


def depends_on_others(function: Callable[[Any], Any], tensor: torch.Tensor) -> bool:
    with torch.enable_grad():
        return bool(function(torch.ones_like(tensor)).requires_grad)


def _with_tensor_aux(
    function: Callable[..., tuple[Any, Any]],
) -> tuple[Callable[..., tuple[Any, list[torch.Tensor]]], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the function with only the tensors of its aux, and a function that restores aux from them.

    The aux of a function in torch.func must consist of tensors.
    """
    last: list[Any] = []

    def tensor_function(*inputs: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        value, aux = function(*inputs)
        last[:] = [aux, keras.tree.flatten(aux)]
        return value, [leaf for leaf in last[1] if isinstance(leaf, torch.Tensor)]

    def with_aux(tensors: Sequence[torch.Tensor]) -> Any:
        aux, leaves = last
        if not tensors:
            return aux
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return keras.tree.pack_sequence_as(aux, leaves)

    return tensor_function, with_aux


_UNRECORDED = message(
    "value_and_grad",
    "the gradient cannot be differentiated with respect to variables, because it was not recorded",
    required="a second derivative by nested gradient functions",
    got="a backward pass through the result, such as `backward()`",
    fix="nest grad(...) for both derivatives, or pass the values of the variables as arguments",
    see="limits#history-of-gradients",
)

_CHANGED = message(
    "value_and_grad",
    "the function changed an argument in place",
    required="a function that leaves the arguments unchanged that it is differentiated with respect to",
    got="a change in place, such as x.mul_(2.0) or torch.nn.ReLU(inplace=True)",
    fix="use the out-of-place operation, such as x * 2.0",
    see="limits#in-place",
)


@private.skip_frames
def _refuse_in_programs(
    gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return the gradients. If a program computed them, differentiating them raises an error.

    PyTorch (2.13 to 2.15) attaches the backward pass of a compiled function only to those tensors that the
    program saved with their history. A derivative of it with respect to other tensors would be zero.
    """
    nodes = [node_of(value) for value in values]
    programs = [node for node in nodes_from(nodes) if type(node).__name__ == private.COMPILED_NODE]
    ends = set(map(node_of, inputs)) if programs else set()
    if not ends & nodes_from(list(programs)):
        return gradients
    return refuse_compiled(gradients, values)


@private.skip_frames
def _depends_on_others(value: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether `value` or its gradient depends on a leaf that is not one of the inputs."""
    seen: set[Any] = set()
    reached: set[int] = set()
    of_inputs = set(map(id, inputs))  # which are alive, so that no other tensor has these ids
    nodes = [node_of(value)] if value.requires_grad else []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        parents = node.next_functions
        if parents:
            nodes.extend([parent for parent, _ in parents if parent is not None])
            if isinstance(node, torch.autograd.function.FunctionCtx):
                nodes.extend(_more_nodes(node, reached))
        else:
            leaf = getattr(node, "variable", None)  # set on nodes of leaves
            if not (leaf is None or id(leaf) in of_inputs or hasattr(leaf, "multigrad_ended")):
                return True
    return False


def _more_nodes(node: Any, reached: set[int]) -> list[Any]:
    """Return the nodes on which the gradient of an op depends, apart from its inputs.

    They belong to residuals from outside of the op and, if a residual is an intermediate result, to tensors
    that the function can reach. `reached` are the ids of objects that have been searched. Saved tensors are
    not read: under a checkpoint this would run the function again.
    """
    if not hasattr(node, "multigrad"):
        return []
    call, closed_over = node.multigrad.call, node.multigrad.closed_over
    if call is None:
        return list(closed_over)
    roots = call.f, *call.objects()
    leaves = [
        leaf for root in roots for leaf in reachable_tensors(root, _LEAVES, (torch.nn.Module,), reached)
    ]
    tensors = [leaf.value if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
    with_nodes = [t for t in tensors if has_node(t)]
    return [*closed_over, *map(node_of, with_nodes)]
