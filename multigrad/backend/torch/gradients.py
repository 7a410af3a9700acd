"""Gradients of functions."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from multigrad.backend.torch.eager import is_view_within, node_of, refuse
from multigrad.backend.torch.jit import is_in_pieces
from multigrad.backend.torch.state import autocast_here, is_compiling, is_transforming
from multigrad.core.errors import message
from multigrad.core.reachable import reachable_tensors
from multigrad.core.type_sets import TypeSet

_LEAVES = TypeSet(torch.Tensor, keras.Variable)


def value_and_grad(
    function: Callable[..., tuple[torch.Tensor, Any]], tensors: Sequence[torch.Tensor], variables: int
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    if is_compiling() and is_in_pieces() and not is_transforming():
        return _between_programs(function, tensors, variables)
    if _by_transform():
        of_tensors, whole = _tensors_of_aux(function)
        places = tuple(range(len(tensors)))
        gradients, (value, aux) = torch.func.grad_and_value(of_tensors, places, has_aux=True)(*tensors)
        return (value, whole(aux)), list(gradients)
    return _recorded(function, tensors, variables)


def _recorded(
    function: Callable[..., tuple[torch.Tensor, Any]], tensors: Sequence[torch.Tensor], variables: int
) -> tuple[tuple[torch.Tensor, Any], list[torch.Tensor]]:
    """The same by a backward pass."""
    recording = torch.is_grad_enabled()
    nested = getattr(_DEPTH, "value", 0)
    _DEPTH.value = nested + 1
    own = _apart(tensors)
    try:
        with torch.enable_grad():
            value, aux = function(*own)
        if not (own and value.requires_grad):
            return (value, aux), [torch.zeros_like(t) for t in tensors]
        # The backward pass is recorded where a second derivative can be asked for: inside another
        # gradient, or where the value depends on what has a history, other than the variables themselves.
        weights = [tensor for tensor in tensors[len(tensors) - variables :] if tensor.requires_grad]
        recorded = recording and (nested > 0 or _depends_on_others(value, [*own, *weights]))
        gradients = torch.autograd.grad(value, own, create_graph=recorded, materialize_grads=True)
        answer = [value, *gradients]
        if not recorded:
            answer = [tensor.detach() for tensor in answer]
            if recording and weights:
                answer = [refuse(tensor, _UNRECORDED, *weights) for tensor in answer]
        return (answer[0], aux), answer[1:]
    finally:
        _DEPTH.value = nested
        _end(own)


# The function is compiled, with its backward pass, and what is around it is not.
_between_programs = torch.compiler.disable(
    _recorded,
    recursive=False,
    reason="torch.func, by which a gradient is compiled whole, allows no graph break in PyTorch 2.13",
)


def vjp(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[Sequence[torch.Tensor], Any], Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]]:
    if _by_transform():
        of_tensors, whole = _tensors_of_aux(lambda *own: _listed(*function(*own)))
        outputs, transpose, aux = torch.func.vjp(of_tensors, *tensors, has_aux=True)
        return (outputs, whole(aux)), lambda upstream: transpose(list(upstream))
    nested = getattr(_DEPTH, "value", 0)
    _DEPTH.value = nested + 1
    own = _apart(tensors)
    try:
        with torch.enable_grad():
            ends, aux = function(*own)
    finally:
        _DEPTH.value = nested
        _end(own)
    # As above; and where there is a derivative by the upstream gradients, as in forward mode.
    others = any([_depends_on_others(end, own) for end in ends])
    outputs = ends if torch.is_grad_enabled() and (nested > 0 or others) else [end.detach() for end in ends]

    def pull(upstream: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = [(end, u) for end, u in zip(ends, upstream, strict=True) if end.requires_grad]
        if not (given and own):
            return [torch.zeros_like(tensor) for tensor in tensors]
        inside = others or getattr(_DEPTH, "value", 0) > 0 or any([u.requires_grad for u in upstream])
        return torch.autograd.grad(
            [end for end, _ in given],
            own,
            [u for _, u in given],
            retain_graph=True,
            create_graph=torch.is_grad_enabled() and inside,
            materialize_grads=True,
        )

    return (outputs, aux), pull


def jacobian(
    function: Callable[..., tuple[Sequence[torch.Tensor], Any]], tensors: Sequence[torch.Tensor]
) -> tuple[Any, list[list[torch.Tensor]]]:
    (outputs, aux), pull = vjp(function, tensors)
    zeros = [torch.zeros_like(output) for output in outputs]
    rows = []
    for place, output in enumerate(outputs):

        def row(upstream: torch.Tensor, place: int = place) -> tuple[torch.Tensor, ...]:
            return tuple(pull([*zeros[:place], upstream, *zeros[place + 1 :]]))

        count = output.numel()
        basis = torch.eye(count, dtype=output.dtype, device=output.device).reshape(count, *output.shape)
        gradients = torch.func.vmap(row)(basis)
        rows.append([g.reshape(output.shape + t.shape) for g, t in zip(gradients, tensors, strict=True)])
    return aux, rows


def _by_transform() -> bool:
    """Whether torch.func takes the derivative: within others of its own, and where nothing is recorded."""
    inside = is_transforming() or torch.compiler.is_dynamo_compiling()
    return inside or torch.is_inference_mode_enabled()


def _listed(outputs: Sequence[torch.Tensor], aux: Any) -> tuple[list[torch.Tensor], Any]:
    """As torch.func.vjp wants an upstream gradient in the very structure of the outputs."""
    return list(outputs), aux


def _apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as variables of a derivative of its own."""
    with torch.enable_grad():  # of whose view the history leads back
        return [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in tensors]


def _end(own: Sequence[torch.Tensor]) -> None:
    """Mark the leaves of a derivative that was taken: from now on nobody asks for another by them.

    While it is being taken somebody may, and in another thread, where `_DEPTH` tells of none.
    """
    for tensor in own:
        if tensor.is_leaf:
            tensor.multigrad_ended = True


def may_record() -> bool:
    return True  # under `torch.no_grad` on purpose; a checkpoint records when it runs again


def needs_plain_rule() -> bool:
    return False


def gradients_expected(tensors: Sequence[torch.Tensor]) -> list[bool]:
    if is_compiling() or torch.float16 in (autocast_here() or ()):
        return [False] * len(tensors)
    anyhow = is_transforming()
    return [torch.is_grad_enabled() and (anyhow or tensor.requires_grad) for tensor in tensors]


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    return torch.no_grad()


def _tensors_of_aux(
    function: Callable[..., tuple[Any, Any]],
) -> tuple[Callable[..., tuple[Any, list[torch.Tensor]]], Callable[[Sequence[torch.Tensor]], Any]]:
    """The function with the tensors of its `aux` alone, which is what torch.func lets out, and how to put
    them back into the rest.
    """
    left: list[Any] = []

    def of_tensors(*own: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        value, aux = function(*own)
        left[:] = [aux, keras.tree.flatten(aux)]
        return value, [leaf for leaf in left[1] if isinstance(leaf, torch.Tensor)]

    def whole(tensors: Sequence[torch.Tensor]) -> Any:
        own = iter(tensors)
        aux, leaves = left
        leaves = [next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return keras.tree.pack_sequence_as(aux, leaves)

    return of_tensors, whole


_UNRECORDED = message(
    "value_and_grad",
    "a derivative of a gradient with respect to variables was asked for, which was not recorded",
    required="a second derivative inside of the function that another gradient is taken of",
    got="a backward pass through the result, as by `backward()`",
    fix="take both by grad(...), or pass the values of the variables as arguments, by `argnums`",
)

_DEPTH = threading.local()
"""How many gradients of `value_and_grad` are being taken around this point of this thread."""


def _depends_on_others(value: torch.Tensor, own: Sequence[torch.Tensor]) -> bool:
    """Whether `value`, or its gradient, depends on a leaf of the user's that is not one of `own`."""
    seen: set[Any] = set()
    reached: set[int] = set()
    nodes = [node_of(value) if value.requires_grad else None]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only the node of a leaf has one
        if leaf is not None and not (hasattr(leaf, "multigrad_ended") or any([leaf is t for t in own])):
            return True
        nodes.extend(parent for parent, _ in node.next_functions)
        nodes.extend(_beside_inputs(node, reached))
    return False


def _beside_inputs(node: Any, reached: set[int]) -> list[Any]:
    """The nodes of what the gradient of an op depends on beside its inputs: what the rule uses, and, where
    that was computed by the function, what the function closes over, or reaches through objects that were
    not `reached` before.

    Nothing is asked for its saved tensors: under a checkpoint that would run the function again.
    """
    if not hasattr(node, "multigrad"):
        return []
    *_, call, _, _, beside = node.multigrad
    if call is None:
        return list(beside)
    roots = call.f, *call.objects()
    # A gradient penalty may use weights that are globals, which no framework sees.
    search = functools.partial(
        reachable_tensors, tensor_types=_LEAVES, through=(torch.nn.Module,), seen=reached, with_globals=True
    )
    leaves = [leaf for root in roots for leaf in search(root)]
    found = [leaf.value if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
    with_nodes = [t for t in found if t.requires_grad and not is_view_within(t)]
    return [*beside, *map(node_of, with_nodes)]
