"""A user's function as a function of flat tensors.

`DifferentiatedFunction` holds the function with its validated `argnums` and `variables`. For each call it
makes a `FlatFunction`, which `multigrad.backend` can differentiate: its arguments are flat tensors.

`multigrad.testing.checked_function` is similar, but it also names its inputs and discards assignments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from multigrad import backend
from multigrad.calculus.validation import (
    as_differentiable,
    as_index,
    require_distinct_variables,
    require_not_constant,
    require_pair,
    resolve_positions,
)
from multigrad.core.conversions import arrays_to_tensors, numbers_to_tensors
from multigrad.core.errors import message, require_function
from multigrad.core.signature import name_of
from multigrad.core.structure import leaves_of, rebuild
from multigrad.core.variables import Pinned


class DifferentiatedFunction:
    """A function, and the arguments and variables that it is differentiated with respect to.

    Arguments:
        f, argnums, variables: as for `multigrad.grad`.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        argnums: int | Sequence[int] | None,
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        require_function("multigrad", "f", f)
        self.f, self.name = f, name_of(f)
        self.variables = None if variables is None else require_distinct_variables(self.name, variables)
        if argnums is None and variables is None:
            argnums = 0
        self.has_one_argnum = argnums is not None and not isinstance(argnums, Sequence)
        self.has_argnums = argnums is not None
        sequence = argnums if isinstance(argnums, Sequence) else () if argnums is None else (argnums,)
        self.argnums = [as_index(self.name, argnum) for argnum in sequence]

    def at(self, args: Sequence[Any], kwargs: Mapping[str, Any], has_aux: bool) -> "FlatFunction":
        """Return the flat function for a call with these arguments."""
        return FlatFunction(self, args, kwargs, has_aux)


class FlatFunction:
    """A function of the flat tensors in the differentiated arguments and variables of one call.

    It returns `(output, (aux, assigned))`: the output of the user's function, its aux, and the values that it
    assigned to variables. `primals` are the tensors at which it is differentiated.
    """

    def __init__(
        self,
        function: DifferentiatedFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        has_aux: bool,
    ) -> None:
        self._function, self._has_aux = function, has_aux
        self._variables = function.variables or []
        self._positions = resolve_positions(function.name, function.argnums, len(args))
        self._structures = [args[position] for position in self._positions]
        if self._positions:
            args = numbers_to_tensors(tuple(args), kwargs)
        self._args = [
            arg if position in self._positions else arrays_to_tensors(arg)
            for position, arg in enumerate(args)
        ]
        self._kwargs = {name: arrays_to_tensors(arg) for name, arg in kwargs.items()}
        leaves = [
            as_differentiable(function.name, f"position {position}", leaf)
            for position, structure in zip(self._positions, self._structures, strict=True)
            for leaf in leaves_of(structure)
        ]
        values = [as_differentiable(function.name, f"variable {v.path!r}", v) for v in self._variables]
        require_not_constant(function.name, self._variables, values)
        self._leaf_count = len(leaves)
        self.primals = leaves + values
        self._assigned_variables: list[keras.Variable] = []

    def __call__(self, *tensors: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        """Call the user's function with `tensors` in place of the primals."""
        args = list(self._args)
        for position, argument in zip(self._positions, self.unflatten_arguments(tensors), strict=True):
            args[position] = argument
        name, values = self._function.name, tensors[self._leaf_count :]
        if backend.active.is_reading_code() and not self._variables:  # Dynamo enters no scope in a rule
            result = self._function.f(*args, **self._kwargs)
            output, aux = require_pair(name, result) if self._has_aux else (result, None)
            return output, (aux, [])
        with _DifferentiatedVariables(name, self._variables, values) as scope:
            result = self._function.f(*args, **self._kwargs)
        assigned = list(scope.assigned.values())
        self._assigned_variables = [variable for variable, _ in assigned]
        output, aux = require_pair(name, result) if self._has_aux else (result, None)
        return output, (aux, [value for _, value in assigned])

    def assign(self, values: Sequence[Any]) -> None:
        """Assign values to the variables that the user's function assigned to."""
        for variable, value in zip(self._assigned_variables, values, strict=True):
            variable.assign(value)

    def unflatten_arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the differentiated arguments with other leaves."""
        remaining = iter(leaves)
        return [rebuild(structure, lambda _: next(remaining)) for structure in self._structures]

    def unflatten(self, gradients: Sequence[Any]) -> Any:
        """Return the gradients of the primals in the structure that `multigrad.grad` documents."""
        by_argument, function = self.unflatten_arguments(gradients), self._function
        gradient = by_argument[0] if function.has_one_argnum else tuple(by_argument)
        if function.variables is None:
            return gradient
        by_variable = list(gradients[self._leaf_count :])
        return (gradient, by_variable) if function.has_argnums else by_variable


class _DifferentiatedVariables(Pinned):
    """The scope in which the user's function reads the primals instead of the values of its variables."""

    stored_values_fit = True

    def __init__(self, name: str, variables: Sequence[keras.Variable], tensors: Sequence[Any]) -> None:
        super().__init__(variables, tensors, name=name)
        self._ids = frozenset(map(id, variables))

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if id(variable) in self._ids and not backend.active.may_record():
            raise TypeError(
                message(
                    self.name,
                    "a differentiated variable is read where no gradient is recorded, so its gradient would "
                    "be zero",
                    required="variables that are read outside of keras.remat, keras.RematScope and other "
                    "code that stops recording",
                    got=f"variable {variable.path!r}",
                    fix="pass `variable.value` to the function as an argument, or remove keras.remat",
                    see="tensorflow#remat-variables",
                )
            )
        return value
