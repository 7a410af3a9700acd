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
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.closure import HoldsNoTensor
from multigrad.errors import message

_TENSORS = backend.active.TENSORS


class Variables(tuple[keras.Variable, ...], HoldsNoTensor):
    """The trainable variables that a call read, in the order in which it read them first."""

    dtypes: Sequence[str] = ()
    """The dtypes in which the function met them: under autocast, not their own."""

    def names(self) -> list[str]:
        """How messages call the variables."""
        return [f"variable {variable.path!r}" for variable in self]


NONE_READ = Variables()


class _Scope(keras.StatelessScope):
    """A scope in which everything is as it is around it.

    It leaves out Keras's own `__init__`, which costs as much as a small op, and makes what it keeps when it
    is first needed: most functions read no variable. The values of variables are in `_value`, which is
    private: Keras (3.15) has no public way to read one past autocasting, whose result has no history where
    a function runs, or to ask whether there is one.
    """

    initialize_variables = False
    original_scope: keras.StatelessScope | None = None
    variables: Sequence[keras.Variable] = ()
    values: Sequence[Any] = ()
    known: Any = MappingProxyType({})
    _losses: list[Any] | None = None

    __init__ = object.__init__

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
            variable, value = update
            with self._outside():
                variable.assign(value)

    def _around(self, variable: keras.Variable) -> Any:
        """The variable's value around this scope, None where Keras is to look itself."""
        if self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        if variable._value is None:
            # It was made in this scope. Keras left it for later, which is when an outermost scope ends.
            with self._outside(), keras.StatelessScope():
                pass
        return None

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class Reads(_Scope):
    """A scope that notes which trainable variables are read in it, each with its value.

    ```python
    scale = keras.Variable(2.0, name="scale")
    with Reads() as scope:
        y = x * scale
    assert [variable.path for variable in scope.variables] == ["scale"]
    ```
    """

    variables: Any = ()
    values: Any = ()
    _dtypes: Any = ()
    _assigned: Any = frozenset()

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self.known.get(id(variable))
        if value is not None:
            return value
        value = self._around(variable)
        if not variable.trainable or id(variable) in self._assigned:
            return value
        if value is None:
            value = variable._value
            if value is None:
                return None  # not there before it is built, which no gradient is taken of
            if not _TENSORS[type(value)]:
                value = backend.active.as_tensor(value)
        if not self.variables:
            self.known, self.variables, self.values, self._dtypes = {}, [], [], []
        self.known[id(variable)] = value
        self.variables.append(variable)
        self.values.append(value)
        self._dtypes.append(variable.dtype)
        return value

    def read(self) -> Variables:
        """The variables that were read."""
        if not self.variables:
            return NONE_READ
        read = Variables(self.variables)
        read.dtypes = self._dtypes
        return read

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self._assigned = self._assigned or set()
        self._assigned.add(id(update[0]))
        super().add_update(update)

    def add_loss(self, loss: Any) -> None:
        raise TypeError(
            message(
                "add_loss",
                "a layer adds a loss inside a function with a custom gradient, where it would have none",
                required="a function whose only results are its outputs",
                got="a call of add_loss, which an activity regularizer makes too",
                mend="call the layer outside of the function, or return the loss as an output",
            )
        )


class Pinned(_Scope):
    """A scope in which variables have given values, and others those that they had at a call.

    Arguments:
        variables, values: what is pinned. A function's `Variables` have the dtypes that it met.
        around: the scope around the call, which may have ended.
        keep: whether assignments are carried out. If not, `assigned` has the variables with their values.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[Any],
        around: keras.StatelessScope | None = None,
        keep: bool = True,
    ) -> None:
        self.variables, self.values = variables, values
        if isinstance(variables, Variables):
            values = [ops.cast(value, dtype) for value, dtype in zip(values, variables.dtypes, strict=True)]
        self.known = dict(zip(map(id, variables), values, strict=True))
        self.assigned: dict[int, tuple[keras.Variable, Any]] = {}
        self.at_call, self._keep = around, keep

    def read(self) -> Any:
        """The variables that are pinned."""
        return self.variables

    def _around(self, variable: keras.Variable) -> Any:
        value = None if self.at_call is None else self.at_call.get_current_value(variable)
        return super()._around(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if self._keep:
            super().add_update(update)
        else:
            self.assigned[id(update[0])] = update
            self.known[id(update[0])] = update[1]


class _Held(HoldsNoTensor):
    """The scope around a call. What it holds are values of variables, which no rule closes over."""

    __slots__ = ("scope",)

    def __init__(self, scope: keras.StatelessScope | None) -> None:
        self.scope = scope


def under_values_of(
    rule: Callable[..., Any],
    variables: Variables,
    values: Sequence[Any],
    around: keras.StatelessScope | None,
    handed: bool,
) -> Callable[..., Any]:
    """`rule` as it is to run later: with the variables as they were, handed to it if it takes them."""
    return functools.partial(_run_rule, rule, variables, list(values), _Held(around), handed)


def _run_rule(
    rule: Callable[..., Any],
    variables: Variables,
    values: Sequence[Any],
    held: _Held,
    handed: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with Pinned(variables, values, held.scope):
        return rule(*args, **kwargs, variables=list(variables)) if handed else rule(*args, **kwargs)
