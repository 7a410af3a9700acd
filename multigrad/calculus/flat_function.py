"""A user's function as a function of flat tensors, which `multigrad.backend` can differentiate.

`DifferentiatedFunction` holds a function with its validated `argnums` and `variables`, and
`DifferentiatedCall` is one call of it. The flat function of `check_gradients` is in
`multigrad/testing/checked_function.py`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from multigrad import backend
from multigrad.calculus.flat_structure import FlatStructure, flatten
from multigrad.calculus.validation import (
    as_differentiable,
    as_index,
    require_distinct_variables,
    require_not_constant,
    require_pair,
    resolve_positions,
)
from multigrad.common.errors import message, require_function, unusable
from multigrad.common.type_sets import Transparent
from multigrad.core.conversions import arrays_to_tensors, numbers_to_tensors
from multigrad.core.signature import name_of
from multigrad.core.structure import leaves_of, rebuild
from multigrad.core.variables import Pinned


class DifferentiatedFunction(Transparent):
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
        if self.variables == [] and not self.argnums:
            required = "at least one variable, or argnums"
            fix = "build the model before you list its variables, and check that it is not frozen"
            raise unusable(ValueError, self.name, "variables", required=required, got=[], fix=fix)


class DifferentiatedCall:
    """A function of the flat tensors in the differentiated arguments and variables of one call.

    It returns `(output, (aux, assigned))`: the output of the user's function, its aux, and the values that it
    assigned to variables. `primals` are the tensors at which it is differentiated.
    """

    output: FlatStructure
    """The output of the last call of `flat_output`, with the tensors of that call."""

    def __init__(
        self,
        function: DifferentiatedFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        has_aux: bool,
    ) -> None:
        self.name, self.variables = function.name, function.variables or []
        self._function, self._has_aux = function, has_aux
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
        values = [as_differentiable(function.name, f"variable {v.path!r}", v) for v in self.variables]
        require_not_constant(function.name, self.variables, values)
        self.primals = leaves + values
        self._assigned_variables: list[keras.Variable] = []

    def __call__(self, *tensors: Any) -> tuple[Any, tuple[Any, list[Any]]]:
        """Call the user's function with `tensors` in place of the primals."""
        count, args, scope = len(tensors) - len(self.variables), list(self._args), None
        for position, argument in zip(
            self._positions, self.unflatten_arguments(tensors[:count]), strict=True
        ):
            args[position] = argument
        if self.variables or not backend.active.is_reading_code():  # Dynamo enters no scope in a rule
            scope = _DifferentiatedVariables(self.name, self.variables, tensors[count:])
        with scope or contextlib.nullcontext():
            result = self._function.f(*args, **self._kwargs)
        output, aux = require_pair(self.name, result) if self._has_aux else (result, None)
        if scope is None:
            return output, (aux, [])
        self._assigned_variables = [variable for variable, _ in scope.assigned.values()]
        return output, (aux, [value for _, value in scope.assigned.values()])

    def flat_output(self, *tensors: Any) -> tuple[Sequence[Any], tuple[Sequence[Any], tuple[Any, list[Any]]]]:
        """Call the user's function. Return the differentiable tensors of its output, and the rest."""
        output, auxiliary = self(*tensors)
        self.output = flatten(output)
        return self.output.differentiable, (self.output.others, auxiliary)

    def assign(self, values: Sequence[Any]) -> None:
        """Assign values to the variables that the user's function assigned to."""
        for variable, value in zip(self._assigned_variables, values, strict=True):
            backend.active.assign(variable, value)

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
        by_variable = list(gradients[len(gradients) - len(self.variables) :])
        return (gradient, by_variable) if function.has_argnums else by_variable


class _DifferentiatedVariables(Pinned):
    """The scope in which the user's function reads the primals instead of the values of its variables."""

    stored_values_fit = is_lasting = True

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
                    see="limits#remat-variables",
                )
            )
        return value
