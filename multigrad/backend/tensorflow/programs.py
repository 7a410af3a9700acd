"""Functions that TensorFlow traces."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Operation
from multigrad.core.process_wide import Shared


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without AutoGraph, as in `fit` of Keras. Concrete functions avoid TensorFlow's warning about retracing.
    traced = tf.function(function, autograph=False)
    return lambda *tensors: traced.get_concrete_function(*tensors)(*tensors)


def operations(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> set[Operation] | None:
    try:
        traced = tf.function(function, autograph=False)
        graph = traced.get_concrete_function(*tensors).graph.as_graph_def()
    except Exception:  # noqa: BLE001 - a function may reject symbolic tensors with any exception
        return None
    nodes = itertools.chain(graph.node, *[nested.node_def for nested in graph.library.function])
    return {dtypes for node in nodes if (dtypes := _dtypes_of(node))}


def _dtypes_of(node: Any) -> Operation | None:
    """Return the dtypes of a node that may have several: a cast, or a function of NumPy arrays."""
    if node.op == "Cast":
        return (_name(node.attr["SrcT"].type),), (_name(node.attr["DstT"].type),)
    if node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc"):
        operands, results = (tuple(map(_name, node.attr[key].list.type)) for key in ("Tin", "Tout"))
        return operands, results
    return None


def _name(number: int) -> str:
    return str(tf.dtypes.as_dtype(number).name)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


_EAGERLY = Shared(_eagerly)  # because TensorFlow has one switch for all threads


def quickest(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    # Tracing takes the time of about 30 eager calls.
    return tf.function(function, autograph=False) if calls > 30 else function


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    return _EAGERLY
