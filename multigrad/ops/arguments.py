"""Convert and check the arguments of ops: tensors, numbers and axes."""

import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NewType, ParamSpec, TypeVar

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.common.errors import unusable
from multigrad.ops.dtypes import dtype_of

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    Tensor = Any
else:
    Tensor = NewType("Tensor", object)
"""A tensor of the active backend, in signatures. Keras (3.15) has no type that a checker understands."""

Pair = tuple[Tensor, Callable[..., Any]]
"""The result of an op's function: the output and the rule."""


def as_tensor(value: Any) -> Any:
    """Convert to a tensor, differentiably. A symbolic tensor is returned unchanged.

    On PyTorch, `keras.ops.convert_to_tensor` (3.15) detaches the tensors of a list.
    """
    if isinstance(value, keras.KerasTensor):
        return value
    if isinstance(value, (list, tuple)) and any(map(ops.is_tensor, tree.flatten(value))):
        return ops.stack([as_tensor(part) for part in value])
    return ops.convert_to_tensor(value)


def tensor_of(op: str, argument: str, value: Any) -> Any:
    """Return the argument as a tensor, or unchanged if it is a Variable. Raise TypeError for other objects.

    A list of tensors is refused, because an op computes a separate gradient for each tensor in it.
    """
    if isinstance(value, (list, tuple)) and any(hasattr(part, "dtype") for part in tree.flatten(value)):
        fix = "pass keras.ops.stack(...) of them"
        raise unusable(TypeError, op, argument, required="one tensor, or numbers", got=value, fix=fix)
    return stack_tensors(op, argument, value)


def stack_tensors(op: str, argument: str, value: Any) -> Any:
    """Return the argument as a tensor, like `tensor_of`. Stack a list of tensors. For use outside ops."""
    if isinstance(value, keras.Variable):
        return value
    parts = tree.flatten(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, (int, float, complex)) or hasattr(part, "dtype") for part in parts):
        raise unusable(TypeError, op, argument, required="a tensor, or numbers", got=value, fix="pass one")
    return as_tensor(value)


def floating(op: str, argument: str, value: Any) -> Any:
    """Return the argument as a tensor. Raise TypeError unless its dtype is real and floating."""
    x = tensor_of(op, argument, value)
    if not keras.backend.is_float_dtype(dtype_of(x)):
        required, fix = "a real floating dtype", "cast it"
        raise unusable(TypeError, op, argument, required=required, got=x, fix=fix)
    return x


def check_axes(op: str, x: Any, axis: Any) -> None:
    """Raise ValueError unless `axis` is None, or one or several axes of `x`."""
    sizes = backend.active.sizes(getattr(x, "shape", ()))
    axes = axis if isinstance(axis, (tuple, list)) else () if axis is None else (axis,)
    if sizes is None or all(is_integer(a) and -len(sizes) <= a < len(sizes) for a in axes):
        return
    required = f"None, or one or several of the {len(sizes)} axes of 'x'"
    fix = "count from 0, or from -1 at the end"
    raise unusable(ValueError, op, "axis", required=required, got=axis, fix=fix)


def with_rank_of(x: Any, like: Any) -> Any:
    """Return a tensor with leading axes of size 1, which jax_numpy_rank_promotion="raise" requires."""
    return ops.reshape(x, (*[1] * (len(like.shape) - len(x.shape)), *x.shape))


def is_number(value: Any) -> bool:
    """Return whether a value is a Python float or integer."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Return whether a value is a Python integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def to_python(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers, also in tuples and lists. Return other values unchanged."""
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(to_python, value))
    number = isinstance(value, (np.number, np.bool_)) or (isinstance(value, np.ndarray) and not value.shape)
    return value.item() if number else value


def with_python_numbers(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Convert NumPy scalars to Python numbers in these arguments of a function.

    An op treats a NumPy scalar as a tensor with a gradient, but these arguments are options.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        before_args = itertools.takewhile(lambda p: p.kind is not p.VAR_POSITIONAL, parameters)
        converted = [p.name in names for p in before_args]

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            pairs = itertools.zip_longest(args, converted[: len(args)], fillvalue=False)
            positional: Any = [to_python(value) if convert else value for value, convert in pairs]
            named: Any = {name: to_python(v) if name in names else v for name, v in kwargs.items()}
            return function(*positional, **named)

        return backend.active.update_wrapper(call, function)

    return decorate
