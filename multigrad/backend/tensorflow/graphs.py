"""The operation of a graph that carries a rule."""

import functools
import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.tapes import stop_recording
from multigrad.backend.tensorflow.tensors import is_differentiable, library_code
from multigrad.core.errors import message

_NAMES = map(f"MultigradRule-{uuid.uuid4().hex}-{{}}".format, itertools.count())
_RULES = "_multigrad_rules"


def graph_here() -> Any:
    """The graph that is being built, None where none is."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_nested(graph: Any) -> bool:
    """Whether it is the graph of a branch or a loop, which stands in another one."""
    return getattr(graph, "is_control_flow_graph", False)


def is_within(graph: Any) -> bool:
    """Whether the graph that is being built is this one, or that of a branch or a loop in it."""
    here = graph_here()
    while here is not graph and is_nested(here):
        here = here.outer_graph
    return here is graph


def _is_around(graph: Any, within: Any) -> bool:
    while within is not None and within is not graph:
        within = getattr(within, "outer_graph", None)
    return within is graph


def brought(make: Callable[[], Any], graph: Any, here: Any) -> Any:
    """What `make` gives in the innermost graph that is around this one and `here`, in `here`.

    The gradient of a branch or a loop is built in a graph beside, which takes tensors only from the graph
    that it stands in, and no variables.
    """
    if not _is_around(here, graph):
        return here.capture(brought(make, graph, here.outer_graph))
    with here.as_default():
        return make()


def captured(tensors: Sequence[Any], graph: Any) -> Sequence[Any]:
    """The tensors as `graph` has them, where some come from around it.

    The gradient of a branch or a loop finds only what that has taken in. That of any other graph finds by
    itself what has a value already. A plain `tf.Graph` has nothing around it.
    """
    if not hasattr(graph, "capture"):
        return tensors
    known = not is_nested(graph)
    return [tensor if known and hasattr(tensor, "numpy") else graph.capture(tensor) for tensor in tensors]


class Carrier:
    """The operation of a graph that gives a call its outputs, and whose gradient is the rule.

    It takes the inputs, too, as a gradient is asked for by what an operation takes. A tape is told of the
    outputs alone: it makes zeros for each one that is not used.

    Where it is copied without that gradient, the guards get one, if only zeros, and say so. They guard the
    inputs, as there may be no way to these from the outputs. A guard comes behind all of the op's tensors, so
    that it is copied with any. And it stands beside: converters to other formats do not know it.

    Arguments:
        name: how messages call the op.
        outputs, inputs, residuals: the tensors of the call.
    """

    __slots__ = ("_before", "_behind", "_name", "_operation", "outputs")

    def __init__(
        self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], residuals: Sequence[Any]
    ) -> None:
        self._name = name
        places = [len(outputs) + i for i, tensor in enumerate(inputs) if is_differentiable(tensor)]
        known = set(map(id, (*outputs, *inputs)))
        # Of what is mapped, the rule may be all that uses anything.
        others = [r for r in residuals if id(r) not in known and _may_be_mapped(r)]
        lost = _lost(name)
        with stop_recording():
            together = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *others])
            guards = [tf.raw_ops.PreventGradient(input=together[place], message=lost) for place in places]
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": next(_NAMES)}):
                own = tf.raw_ops.IdentityN(input=[*outputs, *inputs, *guards, *others])
        self.outputs = list(own[: len(outputs)])
        self._operation = own[0].op
        self._before, self._behind = len(outputs), len(guards) + len(others)

    def carry(self, backward: Callable[..., Sequence[Any]]) -> None:
        """Make `backward`, of upstream gradients to those of the inputs, the gradient of the operation."""
        before, behind = [None] * self._before, [None] * self._behind

        def of_all(*upstream: Any) -> Sequence[Any]:
            return [*before, *backward(*upstream), *behind]

        graph, kind = self._operation.graph, self._operation.get_attr("_gradient_op_type").decode()
        rules = getattr(graph, _RULES, None)
        if rules is None:
            rules = {}
            setattr(graph, _RULES, rules)
        rules[kind] = of_all
        tf.RegisterGradient(kind)(functools.partial(_gradient, self._name, kind, weakref.ref(graph)))


def _may_be_mapped(tensor: Any) -> bool:
    """Whether it can be one of many, for which something like `tf.vectorized_map` copies what uses it."""
    return not (hasattr(tensor, "numpy") or tensor.dtype == tf.resource or tensor.op.type == "Const")


@library_code
def _gradient(name: str, kind: str, graph: Any, op: Any, *upstream: Any) -> Sequence[Any]:
    """The gradient of the operation of this kind; `op` is None where it is traced for a SavedModel."""
    own = graph()
    if own is None or (op is not None and op.graph is not own):
        raise LookupError(_lost(name))
    return getattr(own, _RULES)[kind](*upstream)


def _lost(name: str) -> str:
    return message(
        name,
        "its rule was lost, because something copied its operations",
        required="the operations of the call, in the graph that they were made in",
        got="copies, as tf.vectorized_map makes them, a SavedModel without its gradients or with an op in a "
        "rule, or an import",
        fix="take the gradient inside of what is mapped, save with experimental_custom_gradients=True, "
        "which keeps the rules of a first derivative alone, or call the op again in place of a copy",
        see="tensorflow#vectorized-map",
    )
