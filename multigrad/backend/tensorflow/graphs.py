"""The operation that holds a rule in a graph."""

import functools
import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.private import GRADIENT_KIND, push_forwardprop_state, stop_recording
from multigrad.backend.tensorflow.tensors import is_differentiable, library_code
from multigrad.core.closure import residuals_in
from multigrad.core.errors import message

_NAMES = map(f"MultigradRule-{uuid.uuid4().hex}-{{}}".format, itertools.count())
_RULES = "_multigrad_rules"


def graph_here() -> Any:
    """Return the graph that is being built, or None in eager code."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_nested(graph: Any) -> bool:
    """Return whether a graph is the graph of a branch or a loop, within another graph."""
    return getattr(graph, "is_control_flow_graph", False)


def is_within(graph: Any) -> bool:
    """Return whether the graph that is being built is this graph, or a branch or loop in it."""
    here = graph_here()
    while here is not graph and is_nested(here):
        here = here.outer_graph
    return here is graph


def _encloses(graph: Any, within: Any) -> bool:
    """Return whether a graph is `within`, or an outer graph of it."""
    while within is not None and within is not graph:
        within = getattr(within, "outer_graph", None)
    return within is graph


def make_in_common_graph(make: Callable[[], Any], graph: Any, here: Any) -> Any:
    """Call `make` in the innermost graph that encloses `graph` and `here`, and capture its result in `here`.

    The gradient of a branch or a loop is built in a separate graph, which captures tensors only from its
    outer graph, and captures no variables.
    """
    if not _encloses(here, graph):
        return here.capture(make_in_common_graph(make, graph, here.outer_graph))
    with here.as_default():
        return make()


def capture(tensors: Sequence[Any], graph: Any) -> Sequence[Any]:
    """Return the tensors as `graph` captures them from outer graphs.

    The gradient of a branch or a loop can use only tensors that the branch or loop has captured. The gradient
    of another graph can also use concrete tensors. A plain `tf.Graph` has no outer graph.
    """
    if not hasattr(graph, "capture"):
        return tensors
    uses_concrete = not is_nested(graph)
    return [t if uses_concrete and hasattr(t, "numpy") else graph.capture(t) for t in tensors]


class Carrier:
    """The operation in a graph that returns the outputs of a call, and whose gradient is the rule.

    The inputs of the call are inputs of the operation, too, because TensorFlow computes gradients of the
    inputs of an operation. The tapes record only the outputs, because a tape creates zeros for each unused
    output.

    If the operation is copied without its gradient, for example by `tf.vectorized_map`, the guards raise an
    error when they get a gradient. They guard the inputs, because the outputs may not depend on the inputs in
    the graph. Each guard depends on all tensors of the op, so that a copy of any of them includes the guard.
    The guards are not on the path from inputs to outputs, because converters to other formats do not support
    them.

    Arguments:
        name: the name of the op in messages.
        outputs, inputs: the outputs and inputs of the call.
        others: the residuals that are neither outputs nor inputs.
    """

    __slots__ = ("_first_other", "_input_count", "_name", "_operation", "_output_count", "outputs")

    def __init__(
        self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], others: Sequence[Any]
    ) -> None:
        self._name = name
        indices = [len(outputs) + i for i, tensor in enumerate(inputs) if is_differentiable(tensor)]
        # `tf.vectorized_map` may copy only what depends on these residuals.
        others = [other for other in others if _may_be_mapped(other)]
        lost = _loss_text(name)
        with stop_recording():
            joined = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *others])
            guards = [tf.raw_ops.PreventGradient(input=joined[index], message=lost) for index in indices]
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": next(_NAMES)}):
                results = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *guards, *others])
        self.outputs = list(results[: len(outputs)])
        self._operation = results[0].op
        self._output_count, self._input_count = len(outputs), len(inputs)
        self._first_other = len(outputs) + len(inputs) + len(guards)

    def bind(
        self, backward: Callable[..., Sequence[Any]], backward_of_copy: Callable[..., Sequence[Any]]
    ) -> None:
        """Register `backward`, which maps upstream gradients to gradients of the inputs, as the gradient.

        `backward_of_copy` gets a copy of the operation before the upstream gradients.
        """
        before = [None] * self._output_count
        after = [None] * (len(self._operation.inputs) - self._output_count - self._input_count)

        def gradient(copy: Any, *upstream: Any) -> Sequence[Any]:
            gradients = backward(*upstream) if copy is None else backward_of_copy(copy, *upstream)
            return [*before, *gradients, *after]

        graph, kind = self._operation.graph, self._operation.get_attr(GRADIENT_KIND).decode()
        rules = getattr(graph, _RULES, None)
        if rules is None:
            rules = {}
            setattr(graph, _RULES, rules)
        rules[kind] = gradient
        tf.RegisterGradient(kind)(functools.partial(_gradient, self._name, kind, weakref.ref(graph)))

    def inputs_of(self, copy: Any) -> Sequence[Any]:
        """Return the inputs of the call in the graph of a copy of the operation."""
        return copy.inputs[self._output_count : self._output_count + self._input_count]

    def residuals_of(self, copy: Any, others: Sequence[Any], roles: Sequence[int]) -> list[Any]:
        """Return the residuals of the call in the graph of a copy of the operation."""
        copies = iter(copy.inputs[self._first_other :])
        copied = [next(copies) if _may_be_mapped(other) else _constant(other) for other in others]
        return residuals_in(roles, (*self.inputs_of(copy), *copy.outputs), copied)


def _may_be_mapped(tensor: Any) -> bool:
    """Return whether a tensor may depend on an element of `tf.vectorized_map`, which copies operations."""
    return not (hasattr(tensor, "numpy") or tensor.dtype == tf.resource or tensor.op.type == "Const")


def _is_copied_within(copy: Any, graph: Any) -> bool:
    """Return whether `graph` is a branch or a loop, and is copied within the function around it."""
    function = graph
    while is_nested(function):
        function = function.outer_graph
    return function is not graph and _encloses(function, copy)


def _constant(tensor: Any) -> Any:
    """Return a copy of a constant in the graph that is being built. A handle of a variable is not copied."""
    return tensor if tensor.dtype == tf.resource else tf.constant(tf.get_static_value(tensor), tensor.dtype)


@library_code
def _gradient(name: str, kind: str, graph: Any, op: Any, *upstream: Any) -> Sequence[Any]:
    """Return the gradient of the operation of this kind. `op` is None in a trace for a SavedModel.

    Forward mode around a branch or a loop in a graph builds its gradient from a copy of its graph.
    """
    owner = graph()
    copy = None if op is None or op.graph is owner else op
    if owner is None or (copy is not None and not _is_copied_within(copy.graph, owner)):
        raise LookupError(_loss_text(name))
    with push_forwardprop_state():  # forward mode around a function builds its gradient
        return getattr(owner, _RULES)[kind](copy, *upstream)


def _loss_text(name: str) -> str:
    return message(
        name,
        "the rule was lost, because the operations of the call were copied",
        required="the original operations of the call, in their graph",
        got="copies, for example by tf.vectorized_map, by an import, or by a SavedModel without gradients or "
        "with an op in a rule",
        fix="compute the gradient in the mapped function, save with experimental_custom_gradients=True, "
        "which keeps the rules of first derivatives only, or call the op again instead of copying it",
        see="tensorflow#vectorized-map",
    )
