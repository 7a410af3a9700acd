"""The operation that holds a rule in a graph."""

import functools
import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.tensors import is_differentiable, library_code
from multigrad.common.errors import message

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

    __slots__ = ("_input_count", "_name", "_operation", "_output_count", "outputs")

    def __init__(
        self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], others: Sequence[Any]
    ) -> None:
        self._name = name
        indices = [len(outputs) + i for i, tensor in enumerate(inputs) if is_differentiable(tensor)]
        # `tf.vectorized_map` may copy only what depends on these residuals.
        others = [other for other in others if _may_be_mapped(other)]
        lost = _loss_text(name)
        with private.stop_recording():
            joined = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *others])
            guards = [tf.raw_ops.PreventGradient(input=joined[index], message=lost) for index in indices]
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": next(_NAMES)}):
                results = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *guards, *others])
        self.outputs = list(results[: len(outputs)])
        self._operation = results[0].op
        self._output_count, self._input_count = len(outputs), len(inputs)

    def bind(self, backward: Callable[..., Sequence[Any]]) -> None:
        """Register `backward`, which maps upstream gradients to gradients of the inputs, as the gradient."""
        before = [None] * self._output_count
        after = [None] * (len(self._operation.inputs) - self._output_count - self._input_count)

        def gradient(*upstream: Any) -> Sequence[Any]:
            return [*before, *backward(*upstream), *after]

        graph, kind = self._operation.graph, self._operation.get_attr(private.GRADIENT_KIND).decode()
        rules = getattr(graph, _RULES, None)
        if rules is None:
            rules = {}
            setattr(graph, _RULES, rules)
        rules[kind] = gradient
        tf.RegisterGradient(kind)(functools.partial(_gradient, self._name, kind, weakref.ref(graph)))


def _may_be_mapped(tensor: Any) -> bool:
    """Return whether a tensor may depend on an element of `tf.vectorized_map`, which copies operations."""
    return not (hasattr(tensor, "numpy") or tensor.dtype == tf.resource or tensor.op.type == "Const")


@library_code
def _gradient(name: str, kind: str, graph: Any, op: Any, *upstream: Any) -> Sequence[Any]:
    """Return the gradient of the operation of this kind. `op` is None in a trace for a SavedModel."""
    owner = graph()
    if owner is None or (op is not None and op.graph is not owner):
        raise LookupError(_loss_text(name))
    with private.push_forwardprop_state():  # forward mode around a function builds its gradient
        return getattr(owner, _RULES)[kind](*upstream)


def _loss_text(name: str) -> str:
    return message(
        name,
        "the rule was lost, because the operations of the call were copied",
        required="the original operations of the call, in their graph",
        got="copies, for example by tf.vectorized_map, by an import, by a SavedModel without gradients or "
        "with an op in a rule, or by forward mode around a branch or a loop in a tf.function",
        fix="compute the gradient in the mapped function, save with experimental_custom_gradients=True, "
        "which keeps the rules of first derivatives only, use multigrad.jvp, or call the op again",
        see="limits#vectorized-map",
    )
