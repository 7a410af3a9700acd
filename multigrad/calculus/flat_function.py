"""A user's function as a function of flat tensors, which `multigrad.backend` can differentiate.

`DifferentiatedFunction` holds a function with its validated `argnums` and `variables`, and
`DifferentiatedCall` is one call of it. The flat function of `check_gradients` is in
`multigrad/testing/checked_function.py`.
"""

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.calculus.flat_structure import FlatStructure, flatten, holds_numbers, is_complex
from multigrad.common.errors import describe, message, require_function, unusable
from multigrad.common.type_sets import Transparent
from multigrad.core.conversions import arrays_to_tensors, number_to_tensor, numbers_to_tensors
from multigrad.core.leaves import is_converted_type, to_tensor
from multigrad.core.signature import name_of
from multigrad.core.structure import leaves_of, rebuild
from multigrad.core.variables import Pinned, in_scope


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


def require_scalar(name: str, value: Any) -> Any:
    """Return the output of a function as a tensor. Raise if it is not the tensor of a real scalar."""
    fix = (
        "reduce the output, for example with ops.sum or ops.mean, use multigrad.jacobian, or set has_aux for "
        "a pair of a loss and something else"
    )
    if backend.active.TENSORS[type(value)] or isinstance(value, keras.Variable):
        value = backend.active.as_tensor(value)
        dtype = keras.backend.standardize_dtype(value.dtype)
        if tuple(ops.shape(value)) == () and dtype.startswith(("float", "bfloat")):
            return value
    elif isinstance(value, (int, float, complex)) or is_converted_type(type(value)):
        fix = "compute the loss with keras.ops, without float(), NumPy or model.predict"
    problem = "the output must be a real scalar to have a gradient"
    required = "a floating tensor of shape ()"
    raise TypeError(message(name, problem, required=required, got=describe(value), fix=fix))


def require_real(name: str, tensors: Sequence[Any]) -> None:
    """Raise if a tensor is complex. The Jacobian of a complex function is not one matrix."""
    for tensor in tensors:
        if is_complex(tensor):
            problem = "complex functions have no Jacobian matrix"
            required = "real arguments and outputs"
            fix = "pass and return the real and imaginary parts as two tensors"
            raise TypeError(message(name, problem, required=required, got=describe(tensor), fix=fix))


def require_distinct_variables(name: str, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables as a list. Raise if they are not a list of distinct Keras Variables."""
    if isinstance(variables, (keras.Variable, keras.Layer)):
        got, fix = f"the single variable {variables.path!r}", "pass variables=[variable]"
        if isinstance(variables, keras.Layer):
            got, fix = f"the layer {variables.name!r}", "pass the trainable_variables of the layer or model"
        problem = "variables must be a list"
        required = "a list of Keras Variables"
        raise TypeError(message(name, problem, argument="'variables'", required=required, got=got, fix=fix))
    variables = list(variables)
    for i, variable in enumerate(variables):
        is_variable = isinstance(variable, keras.Variable)
        if not is_variable or any(variable is earlier for earlier in variables[:i]):
            raise TypeError(
                message(
                    name,
                    "variables must be distinct Keras Variables",
                    argument=f"'variables'[{i}]",
                    required="Keras Variables without duplicates",
                    got=f"variable {variable.path!r} a second time" if is_variable else describe(variable),
                    fix="pass, for example, the trainable_variables of a model",
                )
            )
    return variables


def require_not_constant(name: str, variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    """Raise if a compiler would treat the values of the variables as constants."""
    if not variables or in_scope():
        return
    constant = [
        v.path for v, value in zip(variables, values, strict=True) if backend.active.is_constant(value)
    ]
    if constant:
        raise TypeError(
            message(
                name,
                "variables are differentiated in jax.jit, which treats their values as constants, so later "
                "calls would not see new values",
                argument="'variables'",
                required="multigrad.jit, or a keras.StatelessScope, in which variables are inputs",
                got=", ".join([f"variable {path!r}" for path in constant]),
                fix="compile with multigrad.jit instead of jax.jit",
            )
        )


def require_pair(name: str, result: Any) -> tuple[Any, Any]:
    """Return the result of a function with `has_aux` as `(output, aux)`."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    problem = "with has_aux=True the function must return a pair"
    required, fix = "(output, aux)", "return a pair, or omit has_aux"
    raise TypeError(message(name, problem, required=required, got=describe(result), fix=fix))


def as_index(name: str, argnum: Any) -> int:
    """Return an element of `argnums` as an integer."""
    try:
        return operator.index(argnum)
    except TypeError as error:
        required = "the position of an argument, or a tuple or list of positions"
        fix = "pass argnums=0 or argnums=(0, 1), or the variables as variables=..."
        raise unusable(TypeError, name, "argnums", required=required, got=argnum, fix=fix) from error


def resolve_positions(name: str, argnums: Sequence[int], count: int) -> list[int]:
    """Return `argnums` as distinct positions among `count` arguments. Negative ones count from the end."""
    for argnum in argnums:
        if not -count <= argnum < count:
            required = f"a position among the {count} positional argument(s) of the call"
            fix = "pass the argument by position, or correct argnums"
            raise unusable(TypeError, name, "argnums", required=required, got=argnum, fix=fix)
    positions = [argnum % count for argnum in argnums]
    if len(set(positions)) < len(positions):
        required, fix = "each position once", "remove the duplicate"
        raise unusable(TypeError, name, "argnums", required=required, got=argnums, fix=fix)
    return positions


def as_differentiable(name: str, argument: str, leaf: Any) -> Any:
    """Return a leaf of an argument as a floating or complex tensor."""
    tensor = leaf.value if isinstance(leaf, keras.Variable) else leaf
    if not backend.active.TENSORS[type(tensor)] and holds_numbers(tensor):
        tensor = to_tensor(number_to_tensor(tensor))
    if backend.active.TENSORS[type(tensor)] and backend.active.is_differentiable(tensor):
        return tensor
    problem = "cannot differentiate with respect to this argument"
    required = "floating or complex tensors, arrays or numbers"
    fix = "pass floats, or leave it out of argnums and variables"
    raise TypeError(message(name, problem, argument=argument, required=required, got=describe(leaf), fix=fix))
