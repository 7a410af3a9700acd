"""Find the variables that a function reads, also without Keras, and the graphs of their values."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from multigrad.backend.base import S
from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.graphs import graph_here, is_within, make_in_common_graph
from multigrad.backend.tensorflow.tensors import as_tensor
from multigrad.common.errors import message
from multigrad.common.keras_internals import stored_value

_VARIABLE = "_multigrad_variable"


def read_for_gradient(graph: Any, value: Any) -> Any:
    """Return the value of a variable where the gradient of a branch or a loop, with this graph, is built."""
    return make_in_common_graph(lambda: as_tensor(value), graph, graph_here())


class _ReadsInGraph(keras.StatelessScope):
    """A scope that reads variables in the graph in which the function of a call runs.

    A branch or a loop in the function has a separate graph, whose tensors cannot be used outside of it. So
    has a `tf.function`, which is not traced again in the next call, so that Keras does not see its variables
    then. TensorFlow records every access. When the scope ends, it adds the variables that Keras did not see.
    """

    def __enter__(self) -> Any:
        self._graph = graph_here()
        self._seen: dict[int, keras.Variable] = {}
        self._watcher = private.VariableWatcher()
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
                    see="limits#assigned-in-a-loop",
                )
            )
        super().add_update(update)

    def _sees(self, variable: keras.Variable) -> bool:
        """Return whether the variable is read here, and not in a `tf.function` that is traced once."""
        if is_within(self._graph):
            self._seen[id(variable)] = variable
            return True
        if (value := stored_value(variable)) is not None:
            setattr(value, _VARIABLE, weakref.ref(variable))
        return False

    def _add_accessed(self, accessed: Sequence[Any]) -> None:
        """Add the variables that TensorFlow saw and Keras did not."""
        seen = _stored_ids(self._seen.values()) if accessed else ()
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
    return type("ReadsInGraph", (_ReadsInGraph, reads), {})


class _PinnedInGraph(keras.StatelessScope):
    """A scope whose values belong to the graph in which it is entered, and to branches and loops in it.

    A `tf.function` keeps its trace for later calls. So it reads and assigns the variables of TensorFlow, also
    if it is traced in this scope. Without a trace, only TensorFlow sees this. If the variable has another
    value in this scope, an error is raised.
    """

    def __enter__(self) -> Any:
        self._graph = graph_here()
        self._watcher = private.VariableWatcher()
        self._watcher.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watcher.__exit__(*error)
        if error[0] is None:
            accessed = {id(value) for value in self._watcher.watched_variables()}
            for variable in self.variables if accessed else ():
                if isinstance(variable, keras.Variable) and not accessed.isdisjoint(_stored_ids([variable])):
                    self._require_stored(variable, None)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if is_within(self._graph):
            if self.is_lasting and graph_here() is not self._graph:
                self._store_state(variable)
            return super().get_current_value(variable)
        value = self._outer_value(variable)
        self._require_stored(variable, value)
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable = update[0]
        is_inside = is_within(self._graph)
        if is_inside and (graph_here() is self._graph or not self.is_lasting):
            super().add_update(update)
            return
        if is_inside:
            self._store_state(variable)
        if id(variable) in self.current:
            raise self._other_value_error(variable, "assigned")
        self._pass_on(update)

    def _store_state(self, variable: keras.Variable) -> None:
        """Assign the value of a variable that is not differentiated before a loop or branch uses it.

        The loop reads and assigns the variable of TensorFlow in each step. A value in this scope would be the
        same in each step.
        """
        if id(variable) in self.assigned and not variable.trainable:
            with tf.init_scope() if self._graph is None else self._graph.as_default():
                self._pass_on(self.assigned.pop(id(variable)))
            del self.current[id(variable)]

    def _require_stored(self, variable: keras.Variable, outer_value: Any) -> None:
        """Raise if the variable may have another value in this scope than TensorFlow stores."""
        fits = self.stored_values_fit and variable.trainable and id(variable) not in self.assigned
        if id(variable) in self.current and not (fits and outer_value is None):
            raise self._other_value_error(variable, "read")

    def _other_value_error(self, variable: keras.Variable, use: str) -> NotImplementedError:
        return NotImplementedError(  # TensorFlow replaces a TypeError in an operand by its own error
            message(
                self.name,
                f"a variable is {use} in a tf.function, and has another value outside of it",
                required="a tf.function that does not use the variable",
                got=f"variable {variable.path!r}",
                fix="pass the value of the variable to the tf.function as an argument, and return a new one",
                see="limits#variables-in-functions",
            )
        )


def extend_pinned(pinned: S) -> S:
    """Return the subclass of `Pinned` whose values are not stored in the trace of a `tf.function`."""
    extended: Any = type("PinnedInGraph", (_PinnedInGraph, pinned), {})
    return extended


def _stored_ids(variables: Iterable[keras.Variable]) -> set[int]:
    """Return the ids of the variables of TensorFlow, and of their parts on this device."""
    parts = tf.distribute.get_strategy().experimental_local_results
    values = map(stored_value, variables)
    return {id(part) for value in values for part in (value, *parts(value))}


def _variable_of(value: Any) -> keras.Variable | None:
    """Return the Keras Variable of a tf.Variable, or None if it is unknown.

    `_sees` stores the Keras Variable on the tf.Variable when a `tf.function` reads it in a trace. If that
    function was traced before, outside of an op, the tf.Variable is used itself.
    """
    owner = getattr(value, _VARIABLE, None)
    return None if owner is None else owner()
