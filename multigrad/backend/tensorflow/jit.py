"""`multigrad.jit` on TensorFlow: `tf.function`, which captures variables."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from multigrad.backend.base import to_numpy
from multigrad.backend.tensorflow.tapes import may_record
from multigrad.backend.tensorflow.tensors import FOREIGN


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    marks: set[str] = set()  # not empty if a trace has a `vmap` and no tape recorded it

    def trace(*args: Any, **kwargs: Any) -> Any:
        with _collect_marks(marks):
            return function(*args, **kwargs)

    # Without AutoGraph, as in `fit` of Keras, so that Python code runs as on other backends.
    options = {"autograph": False, **options}
    usual, recorded = tf.function(trace, **options), tf.function(trace, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tf.nest.map_structure(
            lambda leaf: to_numpy(leaf) if FOREIGN[type(leaf)] else leaf, (args, kwargs)
        )
        if marks and may_record():
            return recorded(*args, **kwargs)
        result = usual(*args, **kwargs)
        if marks:
            mark_unrecorded()
        return result

    return run


_MARKS: contextvars.ContextVar[tuple[set[str], ...]] = contextvars.ContextVar("marks", default=())


@contextlib.contextmanager
def _collect_marks(marks: set[str]) -> Iterator[None]:
    token = _MARKS.set((*_MARKS.get(), marks))
    try:
        yield
    finally:
        _MARKS.reset(token)


def mark_unrecorded() -> None:
    """Mark the functions that are being compiled: a derivative of them needs another trace.

    A `vmap` in the trace may have lost the rules of its ops, because no derivative was recorded.
    """
    for marks in _MARKS.get():
        marks.add("vmap")
