"""`multigrad.jit` on JAX: the variables of a function become inputs and outputs of the compiled function.

Under a plain `jax.jit`, the value of a variable that a function reads is a constant of the program, and a
value that the function assigns is a leaked tracer. So this module traces the function in a
`keras.StatelessScope`, in which variables have traced values. A first trace, which is discarded, records
which variables these are.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from multigrad.backend.base import to_numpy
from multigrad.backend.jax import private
from multigrad.backend.jax.tensors import (
    FOREIGN,
    NUMBERS,
    TENSORS,
    any_traced,
    assign,
    is_compiling,
    require_not_ended,
)
from multigrad.common.errors import describe, message
from multigrad.common.keras_internals import scope_here, set_stored_value, stored_value

_BY_NUMBER = ("static_argnums", "donate_argnums", "donate_argnames", "in_shardings", "out_shardings")
_MOST_TRACES = 5
"""A first trace, a second for the variables created in the first, and a few for further variables."""


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    return _CompiledFunction(function, name, static, dict(options))


class _CompiledFunction:
    """A function with its programs: one for each structure and each choice of static arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        static: Mapping[str, int | None],
        options: dict[str, Any],
    ) -> None:
        self._function, self.name = function, name
        for option in _BY_NUMBER:
            if option in options:
                raise TypeError(
                    message(
                        self.name,
                        f"multigrad.jit has no option {option!r}",
                        argument=repr(option),
                        required="options of jax.jit that do not refer to single arguments",
                        got=describe(options[option]),
                        fix="use static_argnames for static arguments, and jax.lax.with_sharding_constraint "
                        "in the function for shardings",
                    )
                )
        self._donate = bool(options.pop("donate", True))
        self._options = options
        self._static_names, self._static_positions = frozenset(static), frozenset(static.values())
        self._programs: dict[Any, _Program] = {}
        """The programs, by the structure of their arguments, and the static ones among the leaves."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self._function(*args, **kwargs)
        if self._static_names:
            args = tuple([_Static(a) if i in self._static_positions else a for i, a in enumerate(args)])
            kwargs = {k: _Static(a) if k in self._static_names else a for k, a in kwargs.items()}
        arguments = jax.tree.map(_as_argument, (args, kwargs))
        leaves, structure = jax.tree.flatten(arguments, is_leaf=_is_static)
        static = tuple([leaf if _is_static(leaf) else None for leaf in leaves])
        key = structure, static
        try:
            program = self._programs.get(key)
        except TypeError as error:
            raise self._without_hash(static) from error
        if program is None:
            program = _Program(self.name, self._function, self._options, (), ())
        for _ in range(_MOST_TRACES):
            try:
                output = program(arguments, self._donate)
            except _OtherVariables as error:
                program = program.with_variables(error.read, error.assigned)
                continue
            self._programs[key] = program
            return output
        raise ValueError(
            message(
                self.name,
                "each trace reads or assigns variables that the previous trace did not use",
                required="variables that are created once, before or in the first call of the function",
                got=f"{_MOST_TRACES} traces with new variables",
                fix="create layers, optimizers, metrics and variables outside of the function",
            )
        )

    def _without_hash(self, static: Sequence["_Static | None"]) -> TypeError:
        return TypeError(
            message(
                self.name,
                "a static argument has no hash",
                required="arrays, numbers and nested structures of them, or objects that have a hash",
                got=", ".join([describe(leaf.value) for leaf in static if leaf and not _has_hash(leaf)]),
                fix="pass a tuple for a list, or close over the object",
            )
        )


@jax.tree_util.register_static
class _Static:
    """An argument that is a constant of the trace: a part of the structure of the arguments, for JAX.

    It is compared by value, and a Variable by identity.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value) if isinstance(self.value, keras.Variable) else hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static):
            return NotImplemented
        if self.value is other.value:
            return True
        if isinstance(self.value, keras.Variable) or type(self.value) is not type(other.value):
            return False
        if hash(self) != hash(other):  # some objects cannot be compared with others
            return False
        return bool(self.value == other.value)


def _is_static(leaf: Any) -> bool:
    return type(leaf) is _Static


def _has_hash(static: _Static) -> bool:
    try:
        hash(static)
    except TypeError:
        return False
    return True


def _as_argument(leaf: Any) -> Any:
    """Return a leaf of the arguments as `jax.jit` takes it."""
    if TENSORS[type(leaf)] or NUMBERS[type(leaf)]:
        return leaf
    return to_numpy(leaf) if FOREIGN[type(leaf)] else _Static(leaf)


def _without_static(leaf: Any) -> Any:
    return leaf.value if _is_static(leaf) else leaf


def _as_array(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, keras.Variable) else leaf


class _OtherVariables(Exception):
    """Raised if a trace reads or assigns variables that are not inputs and outputs of its program."""

    def __init__(self, read: Iterable[keras.Variable], assigned: Iterable[keras.Variable]) -> None:
        super().__init__()
        self.read, self.assigned = read, assigned


class _Program:
    """A compiled function of the arguments and of the values of variables.

    Arguments:
        name: the name of the function in messages.
        function: the function of the user.
        options: the options of `jax.jit`.
        assigned: the variables that the function assigns. Their values are inputs and outputs.
        read: other variables, whose values are inputs.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Mapping[str, Any],
        assigned: Sequence[keras.Variable],
        read: Sequence[keras.Variable],
    ) -> None:
        self._name, self._function, self._options = name, function, options
        self._assigned, self._read = assigned, read

        def stateless(old: Sequence[Any], constant: Sequence[Any], arguments: Any) -> Any:
            return self._run(old, constant, arguments)

        stateless.__name__ = stateless.__qualname__ = name  # the name of the program in profiles
        self._keeping = jax.jit(stateless, **options)
        self._donating = jax.jit(stateless, donate_argnums=0, **options)

    def __call__(self, arguments: Any, donate: bool) -> Any:
        around = scope_here()
        old = [_current(variable, around) for variable in self._assigned]
        old = [_strong(value) if value.weak_type else value for value in old]
        constant = [_current(variable, around) for variable in self._read]
        is_concrete = around is None and not any_traced([*old, *constant, *jax.tree.leaves(arguments)])
        if donate and old and is_concrete:
            output, new = self._donating(_copy_shared(old), constant, arguments)
        else:
            output, new = self._keeping(old, constant, arguments)
        if is_concrete and not any_traced(new):
            for variable, value in zip(self._assigned, new, strict=True):
                set_stored_value(variable, value)
            return output
        for variable, value in zip(self._assigned, new, strict=True):
            assign(variable, value)
        return output

    def _run(self, old: Sequence[Any], constant: Sequence[Any], arguments: Any) -> Any:
        """Run the function where its variables have these values. JAX traces this."""
        scope = _VariableScope([*self._assigned, *self._read], [*old, *constant])
        with scope:
            args, kwargs = jax.tree.map(_without_static, arguments, is_leaf=_is_static)
            output = jax.tree.map(_as_array, self._function(*args, **kwargs))
        if scope.others or not {*map(id, self._assigned)}.issuperset(scope.assigned):
            raise _OtherVariables(scope.others.values(), scope.assigned.values())
        new = [scope.current[id(variable)] for variable in self._assigned]
        for variable, value in zip(self._assigned, new, strict=True):
            require_not_ended(variable, value)
        return output, new

    def with_variables(
        self, read: Iterable[keras.Variable], assigned: Iterable[keras.Variable]
    ) -> "_Program":
        """Return the program of the same function that has these variables, too."""
        outputs = {id(v): v for v in (*self._assigned, *assigned)}
        inputs = {id(v): v for v in (*self._read, *read) if id(v) not in outputs}
        if scope_here() is None:
            self._initialize([*outputs.values(), *inputs.values()])
        return _Program(self._name, self._function, self._options, [*outputs.values()], [*inputs.values()])

    def _initialize(self, variables: Sequence[keras.Variable]) -> None:
        """Initialize the variables that a trace created, for which Keras waits until a scope ends."""
        created = [variable.path for variable in variables if stored_value(variable) is None]
        if created and is_compiling():
            raise TypeError(
                message(
                    self._name,
                    "variables are created in a jax.jit, so that their values would be leaked tracers",
                    required="variables that are created before, or multigrad.jit instead of jax.jit",
                    got=", ".join(map(repr, created)),
                    fix="build the layers and the optimizer first, or replace jax.jit by multigrad.jit",
                )
            )
        with keras.StatelessScope():
            pass


class _VariableScope(keras.StatelessScope):
    """A scope in which variables have given values.

    It records other variables that are read, and all variables that are assigned.

    Arguments:
        variables, values: the variables, and their values.
    """

    def __init__(self, variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.current = dict(zip(map(id, variables), values, strict=True))
        self.others: dict[int, keras.Variable] = {}
        self.assigned: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        key = id(variable)
        if key in self.current:
            if key in self.assigned:
                require_not_ended(variable, self.current[key])
            return self.current[key]
        self.others[key] = variable
        return _current(variable, self.original_scope)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        self.assigned[id(variable)], self.current[id(variable)] = variable, value


def _current(variable: keras.Variable, scope: keras.StatelessScope | None) -> Any:
    """Return the value of a variable in a scope, without autocast."""
    value = None if scope is None else scope.get_current_value(variable)
    if value is None:
        value = stored_value(variable)
    if value is None:  # a trace created it, and Keras returns a placeholder
        with keras.StatelessScope(initialize_variables=False):
            value = variable.value
    return value


def _strong(value: Any) -> Any:
    """Return a value without the weak type that JAX gives to Python numbers.

    The values that a program returns have no weak type. If its arguments had one in the first call, JAX would
    compile the program again in the second call.
    """
    return jax.lax.convert_element_type(value, value.dtype)


def _reference_counts(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_COUNT_IN_LIST = _reference_counts([object()])[0]


def _copy_shared(values: list[Any]) -> list[Any]:
    """Return the values, with a copy of each that something other than its variable and this list refers to.

    They are donated, and a donated array is deleted.
    """
    counts = _reference_counts(values)
    return [
        jnp.copy(value) if count > _COUNT_IN_LIST + 1 else value
        for value, count in zip(values, counts, strict=True)
    ]


def is_constant(tensor: Any) -> bool:
    return not isinstance(tensor, jax.core.Tracer) and private.is_in_jit()
