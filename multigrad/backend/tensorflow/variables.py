"""Which variables a function reads, past Keras too, and in which graph they get their values."""

import weakref
from typing import Any

import keras
import tensorflow as tf

from multigrad.backend.tensorflow.graphs import brought, graph_here, is_nested
from multigrad.backend.tensorflow.tensors import as_tensor
from multigrad.errors import message

_VARIABLE = "_multigrad_variable"


def read_beside(graph: Any, value: Any) -> Any:
    """Read the value of a variable where the gradient of a branch or a loop with this graph is built."""
    return brought(lambda: as_tensor(value), graph, graph_here())


class Place:
    """Where the function of a call runs: the graph in which the variables that it reads get their values.

    A branch or a loop within has a graph of its own, out of which no tensor comes but its outputs. So has a
    `tf.function`, which is not traced anew in the next call: Keras is not asked for its variables then. But
    TensorFlow notes all that is accessed, and what the scope has not seen is added when the function ends.
    """

    __slots__ = ("_graph", "_name", "_seen", "_watcher")

    def __init__(self, name: str, watcher: Any) -> None:
        self._name, self._watcher, self._graph = name, watcher, graph_here()
        self._seen: dict[int, keras.Variable] = {}

    def sees(self, variable: keras.Variable) -> bool:
        """Whether the variable is read here, and not within a function that is traced once."""
        graph = graph_here()
        while graph is not self._graph:
            if not is_nested(graph):
                if variable._value is not None:
                    setattr(variable._value, _VARIABLE, weakref.ref(variable))
                return False
            graph = graph.outer_graph
        self._seen[id(variable)] = variable
        return True

    def sees_assigned(self, variable: keras.Variable, known: bool) -> None:
        """The same for an assignment; `known` is whether the function has read the variable before."""
        if self.sees(variable) and known and graph_here() is not self._graph:
            raise TypeError(
                message(
                    self._name,
                    "the function assigns a variable in a branch or a loop, after it has read it",
                    required="trainable variables that keep their values there",
                    got=f"variable {variable.path!r}",
                    mend="carry the value through the loop, and assign it behind",
                )
            )

    def as_tensor(self, value: Any) -> Any:
        """The value of a variable."""
        if graph_here() is self._graph:
            return as_tensor(value)
        with tf.init_scope() if self._graph is None else self._graph.as_default():
            return as_tensor(value)

    def leave(self, scope: Any) -> None:
        """The function has ended: add to `scope` what was read past Keras."""
        accessed = self._watcher.watched_variables()
        if accessed:
            parts = tf.distribute.get_strategy().experimental_local_results
            values = [variable._value for variable in self._seen.values()]
            seen = {id(part) for value in values for part in (value, *parts(value))}
            for value in accessed:
                if id(value) not in seen:
                    self._add(value, scope)

    def _add(self, value: Any, scope: Any) -> None:
        variable = _variable_of(value)
        if variable is None:
            scope.add(value, as_tensor(value))
        else:
            scope.get_current_value(variable)


def _variable_of(value: Any) -> keras.Variable | None:
    """Return the Keras Variable whose value this tf.Variable is, None where it is not known.

    A tf.Variable does not know whose it is. It is noted on it when a function that is traced once reads it.
    Where that was traced before, outside of an op, the tf.Variable stands for itself.
    """
    owner = getattr(value, _VARIABLE, None)
    return None if owner is None else owner()
