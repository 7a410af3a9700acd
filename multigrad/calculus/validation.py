"""Checks of the arguments and results of `grad`, `jacobian` and the like, and their error messages."""

import operator
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.common.errors import describe, message, unusable
from multigrad.core.conversions import number_to_tensor
from multigrad.core.leaves import is_converted_type, to_tensor
from multigrad.core.variables import in_scope


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
    raise TypeError(
        message(
            name,
            "the output must be a real scalar to have a gradient",
            required="a floating tensor of shape ()",
            got=describe(value),
            fix=fix,
        )
    )


def require_real(name: str, tensors: Sequence[Any]) -> None:
    """Raise if a tensor is complex. The Jacobian of a complex function is not one matrix."""
    for tensor in tensors:
        if is_complex(tensor):
            raise TypeError(
                message(
                    name,
                    "complex functions have no Jacobian matrix",
                    required="real arguments and outputs",
                    got=describe(tensor),
                    fix="pass and return the real and imaginary parts as two tensors",
                )
            )


def require_distinct_variables(name: str, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Return the variables as a list. Raise if they are not a list of distinct Keras Variables."""
    if isinstance(variables, (keras.Variable, keras.Layer)):
        got, fix = f"the single variable {variables.path!r}", "pass variables=[variable]"
        if isinstance(variables, keras.Layer):
            got, fix = f"the layer {variables.name!r}", "pass the trainable_variables of the layer or model"
        raise TypeError(
            message(
                name,
                "variables must be a list",
                argument="'variables'",
                required="a list of Keras Variables",
                got=got,
                fix=fix,
            )
        )
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
    raise TypeError(
        message(
            name,
            "with has_aux=True the function must return a pair",
            required="(output, aux)",
            got=describe(result),
            fix="return a pair, or omit has_aux",
        )
    )


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
    raise TypeError(
        message(
            name,
            "cannot differentiate with respect to this argument",
            argument=argument,
            required="floating or complex tensors, arrays or numbers",
            got=describe(leaf),
            fix="pass floats, or leave it out of argnums and variables",
        )
    )


def holds_numbers(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, an array, or a Python float or complex number."""
    kind = type(leaf)
    return backend.active.TENSORS[kind] or is_converted_type(kind) or isinstance(leaf, (float, complex))


def is_complex(tensor: Any) -> bool:
    """Return whether a tensor has a complex dtype."""
    return keras.backend.standardize_dtype(tensor.dtype).startswith("complex")
