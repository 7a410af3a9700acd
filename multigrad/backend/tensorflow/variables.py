"""Find the variables that a function reads, also without Keras, and the graphs of their values."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from multigrad.backend.tensorflow.graphs import graph_here, is_nested, make_in_common_graph
from multigrad.backend.tensorflow.private import VariableWatcher
from multigrad.backend.tensorflow.tensors import as_tensor
from multigrad.core.errors import message

if TYPE_CHECKING:
    from multigrad.core.variables import Reads as _Reads
else:
    _Reads = object

_VARIABLE = "_multigrad_variable"


def read_for_gradient(graph: Any, value: Any) -> Any:
    """Return the value of a variable where the gradient of a branch or a loop, with this graph, is built."""
    return make_in_common_graph(lambda: as_tensor(value), graph, graph_here())


class _InGraph(_Reads):
    """A scope that reads variables in the graph in which the function of a call runs.

    A branch or a loop in the function has a separate graph, whose tensors cannot be used outside of it. So
    has a `tf.function`, which is not traced again in the next call, so that Keras does not see its variables
    then. TensorFlow records every access. When the scope ends, it adds the variables that Keras did not see.
    """

    def __enter__(self) -> Any:
        self._graph = graph_here()
        self._seen: dict[int, keras.Variable] = {}
        self._watcher = VariableWatcher()
        self._watcher.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self._add_accessed(self._watcher.watched_variables())
        finally:
            super().__exit__(*error)
            self._watcher.__exit__(*error)

    def as_tensor(self, value: Any) -> Any:
        if graph_here() is self._graph:
            return as_tensor(value)
        with tf.init_scope() if self._graph is None else self._graph.as_default():
            return as_tensor(value)

    def get_current_value(self, variable: keras.Variable) -> Any:
        return super().get_current_value(variable) if self._sees(variable) else self._outer_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable = update[0]
        if self._sees(variable) and id(variable) in self.current and graph_here() is not self._graph:
            raise TypeError(
                message(
                    self.name,
                    "the function reads a variable, and then assigns it in a branch or a loop",
                    required="trainable variables that are not assigned there",
                    got=f"variable {variable.path!r}",
                    fix="carry the value through the loop, and assign it after the loop",
                    see="tensorflow#assigned-in-a-loop",
                )
            )
        super().add_update(update)

    def _sees(self, variable: keras.Variable) -> bool:
        """Return whether the variable is read here, and not in a `tf.function` that is traced once."""
        graph = graph_here()
        while graph is not self._graph:
            if not is_nested(graph):
                if variable._value is not None:
                    setattr(variable._value, _VARIABLE, weakref.ref(variable))
                return False
            graph = graph.outer_graph
        self._seen[id(variable)] = variable
        return True

    def _add_accessed(self, accessed: Sequence[Any]) -> None:
        """Add the variables that TensorFlow saw and Keras did not."""
        if not accessed:
            return
        parts = tf.distribute.get_strategy().experimental_local_results
        values = [variable._value for variable in self._seen.values()]
        seen = {id(part) for value in values for part in (value, *parts(value))}
        for value in accessed:
            if id(value) not in seen:
                self._add(value)

    def _add(self, value: Any) -> None:
        variable = _variable_of(value)
        if variable is None:
            self.add(value, as_tensor(value))
        else:
            super().get_current_value(variable)


def extend_reads(reads: type[Any]) -> type[Any]:
    """Return the subclass of `Reads` that also finds the variables that a function reads without Keras."""
    return type("ReadsInGraph", (_InGraph, reads), {})


def _variable_of(value: Any) -> keras.Variable | None:
    """Return the Keras Variable of a tf.Variable, or None if it is unknown.

    `_sees` stores the Keras Variable on the tf.Variable when a `tf.function` reads it in a trace. If that
    function was traced before, outside of an op, the tf.Variable is used itself.
    """
    owner = getattr(value, _VARIABLE, None)
    return None if owner is None else owner()
