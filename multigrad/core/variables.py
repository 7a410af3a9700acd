"""Which trainable variables a function reads, and what they hold while a rule runs.

Keras asks the `keras.StatelessScope` that is in force for the value of a variable, and tells it what is
assigned. So a scope around the function sees every variable that it reads, however it came by it; the
values become inputs of the op, beside the arguments. A scope around the rule gives it back the values of
the forward pass: as inputs, with their history, and also after the scope that held them has ended.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Self

import keras
from keras import ops

from multigrad import backend
from multigrad.core.errors import TouchedVariable, message
from multigrad.core.keras_internals import global_state
from multigrad.core.type_sets import HoldsNoTensor

_TENSORS = backend.active.TENSORS


class Variables(tuple[keras.Variable, ...], HoldsNoTensor):
    """The trainable variables that a call read, in the order in which it read them first.

    Those that were read past Keras come behind, and may be the framework's own.
    """

    variadic: str | None = None
    """Arguments may have a name in common; variables have none."""

    dtypes: Sequence[str | None] = ()
    """The dtypes in which the function met them: under autocast, not their own. None for several."""

    state: Sequence[tuple[keras.Variable, Any]] = ()
    """Others that the function read or assigned, with what they held when it began."""

    def names(self) -> list[str]:
        """How messages call the variables."""
        return [f"variable {getattr(variable, 'path', variable.name)!r}" for variable in self]


NONE_READ = Variables()


def _value_of(variable: keras.Variable, as_tensor: Callable[[Any], Any]) -> Any:
    """Return the value of a variable outside of every scope, as a tensor."""
    value = variable._value
    if value is None:
        with _outside():
            return variable.value  # Keras's placeholder, until the variable is initialized
    return value if _TENSORS[type(value)] else as_tensor(value)


class _Scope(keras.StatelessScope):
    """A scope in which everything is as it is around it.

    It leaves out Keras's own `__init__`, which costs as much as a small op, and makes what it keeps when it
    is first needed: most functions read no variable. It comes into force and ends by two calls, where Keras's
    own takes six. The values of variables are in `_value`, which is private: Keras (3.15) has no public way
    to read one past autocasting, whose result has no history where a function runs, or to ask whether there
    is one.
    """

    initialize_variables = False
    original_scope: keras.StatelessScope | None = None
    variables: Sequence[keras.Variable] = ()
    values: Sequence[Any] = ()
    known: Any = MappingProxyType({})
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
        around = self.original_scope
        return True if around is None else around.collect_losses

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
        value = self.known.get(id(variable))
        return self._around(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) in self.known:
            del self.known[id(update[0])]
        if self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            with _outside():
                backend.active.assign(*update)

    def _around(self, variable: keras.Variable) -> Any:
        """The variable's value around this scope, None where Keras is to look itself."""
        if self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        if variable._value is None:
            # It was made in this scope. Keras left it for later, which is when an outermost scope ends.
            with _outside(), keras.StatelessScope():
                pass
        return None


def in_scope() -> bool:
    """Whether a `keras.StatelessScope` is in force, in which variables may have other values."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        return type(scope.original_scope) not in (type(None), Unassigned)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """No scope in force, for a while. A scope that ends puts another in force: the one that it came into."""
    scope = keras.StatelessScope(initialize_variables=False)
    with scope:
        within, scope.original_scope = scope.original_scope, None
    try:
        yield
    finally:
        with scope:
            scope.original_scope = within


class Reads(_Scope):
    """A scope that notes which variables a function reads and assigns in it, each with its value.

    ```python
    scale = keras.Variable(2.0, name="scale")
    with Reads() as scope:
        y = x * scale
    assert [variable.path for variable in scope.variables] == ["scale"]
    ```
    """

    variables: Any = ()
    values: Any = ()
    assigned: Any = ()
    state: Any = ()
    """What variables other than trainable ones that were read held at the beginning, by id."""
    name = ""
    """The name of the op in messages."""
    strict = False
    """Whether to raise `TouchedVariable` where a variable is read or assigned."""
    read_as: Callable[[Any], Any] | None = None
    """What makes of a value the one that the function reads."""
    _dtypes: Any = ()

    def as_tensor(self, value: Any) -> Any:
        """Return the value of a framework's own variable as a tensor."""
        return backend.active.as_tensor(value)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if self.strict:
            raise TouchedVariable
        key = id(variable)
        value = self.known.get(key)
        if value is not None:
            if self._dtypes[key] != variable.dtype:
                self._dtypes[key] = None
            return value
        value = self._around(variable)
        if not variable.trainable:
            return self._read_state(variable, value)
        if value is None:
            assigned = key in self.assigned
            value = _value_of(variable, backend.active.as_tensor if assigned else self.as_tensor)
        if key in self.assigned:
            self._note(variable, self.assigned[key][1])
            return value
        if self.read_as is not None:
            value = self.read_as(value)
        self._note(variable, value)
        self.known[key] = value
        return value

    def _read_state(self, variable: keras.Variable, value: Any) -> Any:
        """The value of a variable that has no gradient, None where Keras is to look itself."""
        if variable._value is None:  # Keras has not made it yet
            return value
        began = self._note_state(variable, value)
        if self.read_as is None or value is None:
            return value
        return self.read_as(value) if id(variable) in self.assigned else began

    def _note_state(self, variable: keras.Variable, value: Any) -> Any:
        """What the variable held at the beginning; `value` is what it holds around this scope."""
        key = id(variable)
        if key not in self.state:
            began = _value_of(variable, self.as_tensor) if value is None else value
            if not variable.trainable:
                began = backend.active.snapshot(began)
            if self.read_as is not None:
                began = self.read_as(began)
            self.state = self.state or {}
            self.state[key] = variable, began
        return self.state[key][1]

    def _note(self, variable: keras.Variable, value: Any) -> None:
        """The function read a variable that came to it with this value."""
        if not self.variables:
            self.known, self._dtypes, self.variables, self.values = {}, {}, [], []
        if id(variable) not in self._dtypes:
            self._dtypes[id(variable)] = variable.dtype
            self.variables.append(variable)
            self.values.append(value)

    def add(self, variable: Any, value: Any) -> None:
        """The function read a variable past Keras, which is one of the framework's own."""
        self._note(variable, value)
        self._dtypes[id(variable)] = None

    def read(self) -> Variables:
        """The trainable variables that were read, and the state beside them."""
        if not (self.variables or self.state):
            return NONE_READ
        read = Variables(self.variables)
        read.dtypes = [self._dtypes[id(variable)] for variable in read]
        if self.state:
            read.state = [pair for key, pair in self.state.items() if key not in self._dtypes]
        return read

    def latest(self) -> Sequence[Any]:
        """What the variables that were read hold at the end of the function."""
        if not self.assigned:
            return self.values
        own = zip(self.variables, self.values, strict=True)
        return [self.get_current_value(v) if id(v) in self.assigned else value for v, value in own]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if self.strict:
            raise TouchedVariable
        variable = update[0]
        key = id(variable)
        if key not in self.assigned:
            began = self.known.get(key)
            if began is None:
                began = self._note_state(variable, self._around(variable))
            self.assigned = self.assigned or {}
            self.assigned[key] = variable, began
        super().add_update(update)

    def add_loss(self, loss: Any) -> None:
        raise TypeError(
            message(
                "add_loss",
                "a layer adds a loss inside a function with a custom gradient, where it would have none",
                required="a function whose only results are its outputs",
                got="a call of add_loss, which an activity regularizer makes too",
                fix="call the layer outside of the function, or return the loss as an output",
            )
        )


class Pinned(_Scope):
    """A scope in which variables have given values, and what is assigned ends with it.

    Others have the values that they had at a call, and a function's state is what it began with.

    Arguments:
        variables, values: what is pinned. A function's `Variables` have the dtypes that it met.
        around: the scope around the call, which may have ended.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[Any],
        around: keras.StatelessScope | None = None,
    ) -> None:
        self.variables, self.values = variables, values
        state: Sequence[tuple[keras.Variable, Any]] = ()
        if isinstance(variables, Variables):
            state = variables.state
            own = zip(values, variables.dtypes, strict=True)
            values = [value if dtype is None else ops.cast(value, dtype) for value, dtype in own]
        self.known = dict(zip(map(id, variables), values, strict=True))
        self.known.update({id(variable): value for variable, value in state})
        self.assigned: dict[int, tuple[keras.Variable, Any]] = {}
        self.at_call = around

    def read(self) -> Any:
        """The variables that are pinned."""
        return self.variables

    def latest(self) -> Sequence[Any]:
        """What they hold now."""
        own = zip(self.variables, self.values, strict=True)
        return [self.assigned.get(id(variable), (variable, value))[1] for variable, value in own]

    def _around(self, variable: keras.Variable) -> Any:
        value = None if self.at_call is None else self.at_call.get_current_value(variable)
        return super()._around(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.assigned[id(update[0])] = update
        self.known[id(update[0])] = update[1]


class _OfRule(Pinned):
    """The scope of a rule. It may assign its function's variables alone, and their values end with it."""

    name = ""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) not in self.known:
            raise _assigned_by_rule(self.name, update[0])
        super().add_update(update)


class Unassigned(_Scope):
    """The scope of a rule whose function touched no variable."""

    name = ""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        raise _assigned_by_rule(self.name, update[0])


def _assigned_by_rule(name: str, variable: keras.Variable) -> TypeError:
    return TypeError(
        message(
            name,
            "the rule assigns a variable, which would move as often as a gradient is asked for",
            required="a rule that assigns no other variables than its function reads or assigns, whose new "
            "values end with the rule",
            got=f"an assignment to variable {variable.path!r}",
            fix="assign it, or draw the random number, in the function or outside of the op",
        )
    )


class ReadBy(_Scope):
    """A scope in which a function reads what variables hold outside of every scope."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def _around(self, variable: keras.Variable) -> Any:
        value = super()._around(variable)
        return self._read(variable._value) if value is None and variable._value is not None else value


class _Held(HoldsNoTensor):
    """The scope around a call. What it holds are values of variables, which no rule closes over."""

    __slots__ = ("scope",)

    def __init__(self, scope: keras.StatelessScope | None) -> None:
        self.scope = scope


def under_values_of(
    name: str,
    rule: Callable[..., Any],
    variables: Variables,
    values: Sequence[Any],
    around: keras.StatelessScope | None,
    handed: bool,
) -> Callable[..., Any]:
    """`rule` as it is to run later: with the variables as they were, handed to it if it takes them."""
    state = [value for _, value in variables.state]
    return functools.partial(_run_rule, name, rule, variables, list(values), state, _Held(around), handed)


def _run_rule(
    name: str,
    rule: Callable[..., Any],
    variables: Variables,
    values: Sequence[Any],
    state: Sequence[Any],
    held: _Held,
    handed: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    scope = _OfRule(variables, values, held.scope)
    scope.name = name
    for (variable, _), value in zip(variables.state, state, strict=True):
        scope.known[id(variable)] = value
    with scope:
        return rule(*args, **kwargs, variables=list(variables)) if handed else rule(*args, **kwargs)
