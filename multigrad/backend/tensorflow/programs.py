"""What is compiled: programs of XLA's, and functions that TensorFlow traces."""

import contextlib
import functools
import itertools
import platform
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.tapes import UNRECORDED, may_record
from multigrad.core.process_wide import Shared


@functools.lru_cache(256)
def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    written = functools.partial(function, False, *static)
    if not has_xla():
        return written
    in_programs = functools.partial(function, True, *static)
    # Two, as TensorFlow takes what it has traced for any number of rows for a number that is known, too.
    for_some, for_any = [tf.function(in_programs, autograph=False, jit_compile=True) for _ in range(2)]

    def in_place(*tensors: list[tf.Tensor]) -> Any:
        traced = for_any if tensors[0][0].shape[0] is None else for_some
        specs = [[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in some] for some in tensors]
        with tf.init_scope():  # apart from the graph that is being built, which it would keep alive
            whole = traced.get_concrete_function(*specs)
        return whole(*tensors)

    def run(rows: list[tf.Tensor], upstream: list[tf.Tensor], others: list[tf.Tensor]) -> Any:
        eager = tf.executing_eagerly()
        # XLA differentiates no loop in place, and of a graph a derivative may be asked for later.
        if may_record() or not (eager or UNRECORDED.get()):
            return written(rows, upstream, others)
        count = rows[0].shape[0]
        known = count is not None
        if not known:
            count, rows, upstream = _alike(rows, upstream)
        # It is compiled anew for each number of rows, and gets one of few where calls have several.
        room = count if known and not eager else _room(count)
        if known and room == count:
            return in_place(rows, upstream, others)
        more = room - count
        more_rows = [tf.concat([t, tf.broadcast_to(t[-1:], (more, *t.shape[1:]))], 0) for t in rows]
        more_upstream = [tf.pad(tensor, [[0, more], [0, 0]]) for tensor in upstream]
        of_rows, of_others = in_place(more_rows, more_upstream, others)
        return [tensor[:count] for tensor in of_rows], of_others

    return run


def has_xla() -> bool:
    return not (platform.system() == "Darwin" and tf.config.list_physical_devices("GPU"))  # none for Metal


def _alike(*lists: list[tf.Tensor]) -> list[Any]:
    """How many rows the tensors have, and the tensors, seen to have as many, which a graph finds out late.

    Where it runs, by an assertion, which XLA leaves out: to that the shape says the same.
    """
    first, *others = itertools.chain(*lists)
    count = tf.shape(first)[0]
    same = [tf.debugging.assert_equal(tf.shape(other)[0], count, _UNLIKE) for other in others]
    with tf.control_dependencies(same):
        return [count, *[[tf.reshape(t, (count, *t.shape[1:])) for t in tensors] for tensors in lists]]


_UNLIKE = "there must be one row of each for each of something: of tokens, say, as many labels as features"


def _room(count: Any) -> Any:
    """The next of few numbers: a multiple of 64, or at most an eighth larger."""
    powers = tf.constant([1 << power for power in range(10, 31)])
    step = tf.reduce_max(tf.where(count >= powers, powers // 8, 64))
    return -(-count // step) * step


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without AutoGraph, as Keras's own training, and not called as it is: TensorFlow warns of many functions
    # of one code.
    whole = tf.function(function, autograph=False)
    return lambda *tensors: whole.get_concrete_function(*tensors)(*tensors)


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


_EAGERLY = Shared(_eagerly)  # TensorFlow's switch is one for all threads


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return _EAGERLY
