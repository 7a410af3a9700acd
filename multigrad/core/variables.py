"""Record the variables that a function reads, and give its rule the same values.

Keras asks the active `keras.StatelessScope` for the value of a variable, and passes assignments to it. So a
scope around the function records every variable that it reads. Their values become inputs of the op. A scope
around the rule returns the values of the forward pass, which are differentiable inputs of the op.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import keras
from keras import ops

from multigrad import backend
from multigrad.common.errors import message
from multigrad.common.keras_internals import global_state, scope_here, stored_dtype, stored_value
from multigrad.common.type_sets import HoldsNoTensor

_TENSORS = backend.active.TENSORS


class Variables(tuple[keras.Variable, ...], HoldsNoTensor):
    """The trainable variables that a call read, in the order of first use.

    Variables that were read without Keras come last. They can be variables of the framework.
    """

    variadic: str | None = None
    keywords: Sequence[str] = ()
    """Empty, as `variadic` is: in `Arguments`, this class stands for a `Binding` without named parameters."""

    dtypes: Sequence[str | None] = ()
    """The dtype in which the function read each variable, which autocast may change. None for several."""

    state: Sequence[tuple[keras.Variable, Any]] = ()
    """The other variables that the function read or assigned, with their values before the call."""

    def names(self) -> list[str]:
        """Return the names of the variables in messages."""
        return [f"variable {getattr(variable, 'path', variable.name)!r}" for variable in self]


NONE_READ = Variables()


def _value_of(variable: keras.Variable, as_tensor: Callable[[Any], Any]) -> Any:
    """Return the value of a variable outside of every scope, as a tensor."""
    value = stored_value(variable)
    if value is None:
        with _no_scope():
            return variable.value  # a placeholder of Keras, until the variable is initialized
    return value if _TENSORS[type(value)] else as_tensor(value)


# A dict, because Dynamo (PyTorch 2.13) rejects a read of a `MappingProxyType` in a rule as a side effect.
_NO_VALUES: dict[int, Any] = {}


class _Scope(keras.StatelessScope):
    """A scope that passes reads and assignments on to the scope around it.

    It skips `keras.StatelessScope.__init__`, which takes as long as a small op, and creates its containers
    when they are needed: most functions read no variable. Entering and leaving it takes two calls, six with
    Keras's methods.
    """

    initialize_variables = False
    original_scope: keras.StatelessScope | None = None
    name = ""
    """The name of the op or function in messages."""
    variables: Sequence[keras.Variable] = ()
    values: Sequence[Any] = ()
    current: Any = _NO_VALUES
    """The values that variables have in this scope, by the ids of the variables."""
    rule: Any = None
    """In the scope of a rule whose residuals have been lifted, the rule."""
    residuals: Sequence[Any] = ()
    """In the scope of such a rule, its residuals."""
    _losses: list[Any] | None = None

    __init__ = object.__init__

    def __enter__(self) -> Self:
        state = global_state.GLOBAL_STATE_TRACKER
        self.original_scope = vars(state).get("stateless_scope")
        state.stateless_scope = self
        return self

    def __exit__(self, *error: object) -> None:
        global_state.GLOBAL_STATE_TRACKER.stateless_scope = self.original_scope

    @property
    def collect_losses(self) -> bool:
        outer_scope = self.original_scope
        return True if outer_scope is None else outer_scope.collect_losses

    @property
    def losses(self) -> list[Any]:
        if self.original_scope is not None:
            return self.original_scope.losses
        if self._losses is None:
            self._losses = []
        return self._losses

    def add_loss(self, loss: Any) -> None:
        self.losses.append(loss)

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.current.get(id(variable))
        return self._outer_value(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) in self.current:
            del self.current[id(update[0])]
        self._pass_on(update)

    def _pass_on(self, update: tuple[keras.Variable, Any]) -> None:
        """Pass an assignment to the scope around this one, or to the variable."""
        if self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            with _no_scope():
                backend.active.assign(*update)

    def _outer_value(self, variable: keras.Variable) -> Any:
        """Return the value of a variable around this scope. None means that Keras reads its stored value."""
        if self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
            return None if value is stored_value(variable) else value
        if stored_value(variable) is None:
            # It was created in this scope. Keras initializes it when an outermost scope ends.
            with _no_scope(), keras.StatelessScope():
                pass
        return None


def in_scope() -> bool:
    """Return whether a `keras.StatelessScope` is active, in which variables may have other values."""
    return type(scope_here()) not in (type(None), ReadOnly)


def inputs_of_outer_rule() -> Sequence[Any] | None:
    """Return the floating inputs of the op whose rule calls the present op, None if no rule does.

    An input that the rule does not close over is None.
    """
    scope = vars(global_state.GLOBAL_STATE_TRACKER).get("stateless_scope")
    if not isinstance(scope, _Scope) or scope.rule is None:
        return None
    inputs = dict(zip(scope.rule.roles, scope.residuals, strict=False))
    return [inputs.get(index) for index, spec in enumerate(scope.rule.specs) if spec is not None]


def name_of_caller() -> str:
    """Return the name of the op whose function or rule calls the present op, "" for none.

    It is called in the function of the present op.
    """
    present = scope_here()
    return getattr(present.original_scope, "name", "") if isinstance(present, _Scope) else ""


@contextlib.contextmanager
def _no_scope() -> Iterator[None]:
    """Deactivate all scopes for a while.

    When a scope ends, it activates its `original_scope`. So a scope that is entered and left again activates
    the scope that `original_scope` was set to in between.
    """
    scope = keras.StatelessScope(initialize_variables=False)
    with scope:
        active, scope.original_scope = scope.original_scope, None
    try:
        yield
    finally:
        with scope:
            scope.original_scope = active


class Uses(_Scope):
    """A scope that records the variables that a function reads, and whether they are trainable."""

    def __init__(self, trainable: dict[int, tuple[keras.Variable, bool]]) -> None:
        self._trainable = trainable

    def get_current_value(self, variable: keras.Variable) -> Any:
        self._trainable.setdefault(id(variable), (variable, variable.trainable))
        value = self._outer_value(variable)
        return stored_value(variable) if value is None else value  # Keras passes it to a regularizer


class Reads(_Scope):
    """A scope that records the variables that a function reads and assigns, with their values.

    ```python
    scale = keras.Variable(2.0, name="scale")
    with Reads() as scope:
        y = x * scale
    assert [variable.path for variable in scope.variables] == ["scale"]
    ```
    """

    variables: Any = ()
    """The trainable variables that were read."""
    values: Any = ()
    """The values that were read from them."""
    assigned: Any = ()
    """The variables that were assigned, with their values before, by id."""
    state: Any = ()
    """The other variables that were read or assigned, with their values before the call, by id."""
    strip: Callable[[Any], Any] | None = None
    """Removes the history of the value of a variable. The function reads the result."""
    _dtypes: Any = ()
    _originals: Any = ()
    """The values to which `strip` was applied, by the ids of their variables."""

    def as_tensor(self, value: Any) -> Any:
        """Return the value of a variable of the framework as a tensor."""
        return backend.active.as_tensor(value)

    def get_current_value(self, variable: keras.Variable) -> Any:
        key = id(variable)
        value = self.current.get(key)
        if value is not None:
            if self._dtypes[key] != variable.dtype:
                self._dtypes[key] = None
            return value
        value = self._outer_value(variable)
        if not variable.trainable:
            return self._read_state(variable, value)
        if value is None:
            assigned = key in self.assigned
            value = _value_of(variable, backend.active.as_tensor if assigned else self.as_tensor)
        if key in self.assigned:
            self._record(variable, self.assigned[key][1])
            return value
        value = self._stripped(variable, value)
        self._record(variable, value)
        self.current[key] = value
        return value

    def _stripped(self, variable: keras.Variable, value: Any) -> Any:
        """Return the value that the function reads for the value of a variable before the call."""
        if self.strip is None:
            return value
        self._originals = self._originals or {}
        self._originals[id(variable)] = value
        return self.strip(value)

    def originals(self) -> Sequence[Any]:
        """Return the values of the variables that were read, as they were before `strip`."""
        return [self._originals[id(variable)] for variable in self.variables]

    def _read_state(self, variable: keras.Variable, value: Any) -> Any:
        """Return the value of a variable that is not trainable. None means that Keras reads its stored value.

        `value` is its value around this scope.
        """
        if value is None and stored_value(variable) is None:  # not initialized; `fit` on JAX stores no values
            return None
        initial = self._record_state(variable, value)
        if self.strip is None or value is None:
            return value
        return self.strip(value) if id(variable) in self.assigned else initial

    def _record_state(self, variable: keras.Variable, value: Any) -> Any:
        """Record a variable as state, and return its value before the call.

        `value` is its value around this scope.
        """
        key = id(variable)
        if key not in self.state:
            initial = _value_of(variable, self.as_tensor) if value is None else value
            if not variable.trainable:
                initial = backend.active.snapshot(initial)
            self.state = self.state or {}
            self.state[key] = variable, self._stripped(variable, initial)
        return self.state[key][1]

    def _record(self, variable: keras.Variable, value: Any) -> None:
        """Record that the function reads a trainable variable, whose value before the call was `value`."""
        if not self.variables:
            self.current, self._dtypes, self.variables, self.values = {}, {}, [], []
        if id(variable) not in self._dtypes:
            self._dtypes[id(variable)] = variable.dtype
            self.variables.append(variable)
            self.values.append(value)

    def add(self, variable: Any, value: Any) -> None:
        """Record that the function read a variable of the framework without Keras."""
        self._record(variable, value)
        self._dtypes[id(variable)] = None

    def as_variables(self) -> Variables:
        """Return the variables that were read."""
        if not (self.variables or self.state):
            return NONE_READ
        read = Variables(self.variables)
        read.dtypes = [self._dtypes[id(variable)] for variable in read]
        if self.state:
            read.state = [pair for key, pair in self.state.items() if key not in self._dtypes]
        return read

    def final_values(self) -> Sequence[Any]:
        """Return the values of the variables at the end of the function."""
        pairs = zip(self.variables, self.values, strict=True)
        return [self.get_current_value(v) if id(v) in self.assigned else value for v, value in pairs]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable = update[0]
        key = id(variable)
        if key not in self.assigned:
            initial = self.current.get(key)
            if initial is None:
                initial = self._record_state(variable, self._outer_value(variable))
            self.assigned = self.assigned or {}
            self.assigned[key] = variable, initial
        super().add_update(update)

    def add_loss(self, loss: Any) -> None:
        raise TypeError(
            message(
                "add_loss",
                "a layer adds a loss in a function with a custom gradient, where the loss has no gradient",
                required="a function whose only results are its outputs",
                got="a call of add_loss, possibly by an activity regularizer",
                fix="call the layer outside of the function, or return the loss as an output",
                see="limits#add-loss",
            )
        )


@backend.active.extend_pinned
class Pinned(_Scope):
    """A scope that gives variables the values of a call, and discards assignments when it ends.

    Arguments:
        variables: the variables. If they are a `Variables`, each is cast to the dtype in which it was read,
            and its state has the values that it had before the call.
        values: their values, which those of their state may follow.
        outer_scope: the scope that was active around the call. It has the values of all other variables.
        name: the name of the op or function in messages.
    """

    stored_values_fit = False
    """Whether a trainable variable of the framework that is read directly also has a gradient."""
    is_lasting = False
    """Whether the values that are assigned in the scope outlast it."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[Any],
        outer_scope: keras.StatelessScope | None = None,
        name: str = "",
    ) -> None:
        self.variables, self.values, self.name = variables, values, name
        self.current = dict(zip(map(id, variables), values, strict=False))
        if isinstance(variables, Variables):
            for variable, dtype, value in zip(variables, variables.dtypes, values, strict=False):
                if dtype is not None and dtype != stored_dtype(variable):
                    self.current[id(variable)] = ops.cast(value, dtype)
            of_state = values[len(variables) :] or [value for _, value in variables.state]
            for (variable, _), value in zip(variables.state, of_state, strict=True):
                self.current[id(variable)] = value
        self.assigned: dict[int, tuple[keras.Variable, Any]] = {}
        self.outer_scope = outer_scope

    def as_variables(self) -> Any:
        """Return the variables."""
        return self.variables

    def final_values(self) -> Sequence[Any]:
        """Return the values of the variables, as they are now."""
        pairs = zip(self.variables, self.values, strict=True)
        return [self.assigned.get(id(variable), (variable, value))[1] for variable, value in pairs]

    def _outer_value(self, variable: keras.Variable) -> Any:
        value = None if self.outer_scope is None else self.outer_scope.get_current_value(variable)
        return super()._outer_value(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned[id(update[0])] = update
        self.current[id(update[0])] = update[1]


class RuleScope(Pinned):
    """The scope of a rule, which may assign only variables that its function used.

    The scope discards the new values when it ends.
    """

    stored_values_fit = True

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) not in self.current:
            raise _assignment_error(self.name, update[0])
        super().add_update(update)


class ReadOnly(_Scope):
    """The scope of a rule whose function read and assigned no variable. The rule may not assign one."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        raise _assignment_error(self.name, update[0])


def _assignment_error(name: str, variable: keras.Variable) -> TypeError:
    return TypeError(
        message(
            name,
            "the rule assigns a variable, so that its value would depend on how often gradients are computed",
            required="a rule that assigns only variables that its function uses",
            got=f"an assignment to variable {variable.path!r}",
            fix="assign the variable, or draw the random number, in the function or outside of the op",
            see="limits#rules-that-assign",
        )
    )


class ReadBy(_Scope):
    """A scope that reads the stored values of variables by a function of the framework's variable."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def _outer_value(self, variable: keras.Variable) -> Any:
        value, stored = super()._outer_value(variable), stored_value(variable)
        return self._read(stored) if value is None and stored is not None else value
