"""XLA programs, and functions that TensorFlow traces."""

import contextlib
import functools
import itertools
import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import Operation
from multigrad.backend.tensorflow.tapes import UNRECORDED, may_record
from multigrad.core.process_wide import Shared


@functools.lru_cache(256)
def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    uncompiled_function = functools.partial(function, False, *static)
    if not has_xla():
        return uncompiled_function
    compilable = functools.partial(function, True, *static)
    # Two functions, because TensorFlow would use a trace for any number of rows for a static number, too.
    for_static, for_dynamic = [tf.function(compilable, autograph=False, jit_compile=True) for _ in range(2)]

    def in_place(*tensors: list[tf.Tensor]) -> Any:
        traced = for_dynamic if tensors[0][0].shape[0] is None else for_static
        specs = [[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in group] for group in tensors]
        with tf.init_scope():  # outside the graph that is being built, which the trace would keep alive
            concrete_function = traced.get_concrete_function(*specs)
        return concrete_function(*tensors)

    def run(rows: list[tf.Tensor], upstream: list[tf.Tensor], others: list[tf.Tensor]) -> Any:
        eager = tf.executing_eagerly()
        # XLA cannot differentiate loops that update in place, and a graph may be differentiated later.
        if may_record() or not (eager or UNRECORDED.get()):
            return uncompiled_function(rows, upstream, others)
        count = rows[0].shape[0]
        is_static = count is not None
        if not is_static:
            count, rows, upstream = with_equal_counts(rows, upstream)
        # Each number of rows is compiled separately. If calls may differ, the number is rounded up.
        padded = count if is_static and not eager else _rounded_up(count)
        if is_static and padded == count:
            return in_place(rows, upstream, others)
        added = padded - count
        padded_rows = [tf.concat([t, tf.broadcast_to(t[-1:], (added, *t.shape[1:]))], 0) for t in rows]
        padded_upstream = [tf.pad(tensor, [[0, added], [0, 0]]) for tensor in upstream]
        row_results, other_results = in_place(padded_rows, padded_upstream, others)
        return [tensor[:count] for tensor in row_results], other_results

    return run


def has_xla() -> bool:
    return not (platform.system() == "Darwin" and tf.config.list_physical_devices("GPU"))  # Metal has no XLA


def with_equal_counts(*lists: list[tf.Tensor]) -> list[Any]:
    """Return the number of rows, and the tensors after an assertion that they have this number of rows.

    The assertion runs with the graph. XLA removes it, so the tensors are also reshaped to the number of rows.
    """
    first, *others = itertools.chain(*lists)
    count = tf.shape(first)[0]
    same = [tf.debugging.assert_equal(tf.shape(other)[0], count, _DIFFERENT_COUNTS) for other in others]
    with tf.control_dependencies(same):
        return [count, *[[tf.reshape(t, (count, *t.shape[1:])) for t in tensors] for tensors in lists]]


_DIFFERENT_COUNTS = "the tensors must have the same number of rows, for example as many labels as features"


def _rounded_up(count: Any) -> Any:
    """Round up to a multiple of 64, or by at most an eighth, so that there are few different numbers."""
    powers = tf.constant([1 << power for power in range(10, 31)])
    step = tf.reduce_max(tf.where(count >= powers, powers // 8, 64))
    return -(-count // step) * step


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
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


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _EAGERLY
