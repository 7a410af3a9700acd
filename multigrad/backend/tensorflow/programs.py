"""Functions that TensorFlow traces."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import F, Operation
from multigrad.backend.tensorflow.tensors import library_code
from multigrad.common.errors import message
from multigrad.common.process_wide import Shared
from multigrad.common.type_sets import HoldsNoTensor


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without AutoGraph, as in `fit` of Keras. Concrete functions avoid TensorFlow's warning about retracing.
    traced = tf.function(function, autograph=False)
    return lambda *tensors: traced.get_concrete_function(*tensors)(*tensors)


class _Wrapper(tf.types.experimental.TraceType, HoldsNoTensor):
    """The type of a wrapper that is an argument of a `tf.function`.

    Without it, TensorFlow (2.21) passes `wrapper.__wrapped__` in place of the wrapper: the function in place
    of its gradient. Other functions may have this type: `functools.wraps` copies the attributes of a
    function, a bound method has those of its function, and a rule has a copy of a function. TensorFlow would
    call the wrapper in their place, so they raise an error.
    """

    def __init__(self, wrapper: weakref.ref[Callable[..., Any]], name: str) -> None:
        self.wrapper, self.name, self.hash = wrapper, name, hash(wrapper)  # also if it is freed

    def __call__(self, context: Any) -> "_Wrapper":
        return self

    def placeholder_value(self, placeholder_context: Any) -> Any:
        self._require(self.wrapper() is not None)
        return self.wrapper()

    def to_tensors(self, value: Any) -> list[Any]:
        self._require(value is self.wrapper())
        return []

    def _require(self, is_wrapper: bool) -> None:
        if not is_wrapper:
            raise TypeError(
                message(
                    self.name,
                    "TensorFlow would call this function in place of an argument of a tf.function",
                    required="a function that multigrad returned",
                    got="a decorated function, a method, or a function in a rule that closes over a tensor",
                    fix="pass a lambda that calls the argument",
                    see="limits#decorated-arguments",
                )
            )

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Any:
        return self if all(self == other for other in others) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wrapper) and self.wrapper == other.wrapper

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        return self.name


def update_wrapper(wrapper: F, wrapped: Callable[..., Any]) -> F:
    updated: Any = functools.update_wrapper(library_code(wrapper), wrapped)
    updated.__tf_tracing_type__ = _Wrapper(weakref.ref(updated), updated.__name__)
    return updated


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


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    return _EAGERLY
