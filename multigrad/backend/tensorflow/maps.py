"""`vmap`: `tf.vectorized_map`, or `tf.map_fn` where the former would lose a rule.

`tf.vectorized_map` converts each operation of the mapped function, and drops its custom gradient. Gradients
inside of the mapped function are recorded before, and keep their rules.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.defaults import mapped
from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.jit import mark_unrecorded
from multigrad.backend.tensorflow.tapes import may_record

Function = Callable[..., tuple[Sequence[Any], Sequence[Any]]]

_ROWS_IN_LOOP = 48
"""The number of rows of a Jacobian up to which a loop takes less time in eager code than tracing a map."""


def vmap(function: Function, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if any(tensor.shape[:1].num_elements() is None for tensor in tensors):
        tensors = _with_equal_counts(list(tensors))
    counts: list[int] = []

    def flat(elements: Sequence[Any]) -> list[Any]:
        stacked, shared = function(*elements)
        counts[:] = [len(stacked)]
        return [tf.convert_to_tensor(result) for result in (*stacked, *shared)]

    def vectorize(*tensors: Any) -> list[Any]:
        if all(tensor.shape[0] == 1 for tensor in tensors):
            # TensorFlow 2.21 fails if `tf.vectorized_map` around a `tf.function` meets a map of one element.
            return [tf.expand_dims(result, 0) for result in flat([tensor[0] for tensor in tensors])]
        return list(tf.vectorized_map(flat, list(tensors)))

    eager, recorded = tf.executing_eagerly(), may_record()
    if eager or recorded:
        # Traced here, because `tf.vectorized_map` warns about each trace in eager code.
        program = tf.function(vectorize, autograph=False).get_concrete_function(*map(_spec, tensors))
    if recorded and _has_rule(program.graph.as_graph_def()):
        likes = program.structured_outputs
        signature = [tf.TensorSpec(None, like.dtype) for like in likes]
        results = tf.map_fn(flat, list(tensors), fn_output_signature=signature)
        for result, like in zip(results, likes, strict=True):
            result.set_shape(like.shape)
    else:
        if not recorded:
            mark_unrecorded()
        # Not a call of the program in a graph: `tf.vectorized_map` around it would fail to convert the call.
        results = program(*tensors) if eager else vectorize(*tensors)
    count = counts[0]
    return results[:count], [result[0] for result in results[count:]]


_map_traced = mapped(vmap)


def map_rows(row: Callable[[Any], Sequence[Any]], upstreams: Any) -> Sequence[Any]:
    if not tf.executing_eagerly() or len(upstreams) > _ROWS_IN_LOOP:
        return _map_traced(row, upstreams)
    return list(map(tf.stack, zip(*map(row, tf.unstack(upstreams)), strict=True)))


def _with_equal_counts(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors after an assertion that they have the same number of elements.

    The assertion runs with the graph. XLA removes it, so the tensors are also reshaped to this number.
    """
    count = tf.shape(tensors[0])[0]
    text = "the mapped axes must have the same size"
    same = [tf.debugging.assert_equal(tf.shape(other)[0], count, text) for other in tensors[1:]]
    with tf.control_dependencies(same):
        return [tf.reshape(x, tf.concat([[count], tf.shape(x)[1:]], 0)) for x in tensors]


def _spec(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _has_rule(graph: Any) -> bool:
    """Return whether a graph, or a function in it, has an operation with a custom gradient."""
    nodes = itertools.chain(graph.node, *[nested.node_def for nested in graph.library.function])
    return any(private.GRADIENT_KIND in node.attr for node in nodes)


def depends_on_element(result: Any, elements: Sequence[Any]) -> bool:
    if tf.executing_eagerly():
        return False  # the function has been traced before
    ends = {id(element.op) for element in elements}
    seen: set[int] = set()
    operations = [result.op] if hasattr(result, "op") else []
    while operations:
        operation = operations.pop()
        if id(operation) in ends:
            return True
        if id(operation) not in seen:
            seen.add(id(operation))
            operations += [tensor.op for tensor in operation.inputs]
    return False


@private.RegisterPFor("PreventGradient")
def _convert_guard(pfor_input: Any) -> Any:
    """Vectorize the guards of an op (see `graphs.Carrier`), which would otherwise run in a loop."""
    guarded, text = pfor_input.stacked_input(0), pfor_input.get_attr("message")
    return private.wrap(tf.raw_ops.PreventGradient(input=guarded, message=text), True)
