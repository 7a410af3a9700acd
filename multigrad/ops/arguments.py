"""What an op is given, as it computes with it: tensors of what can be one, and numbers of Python's own."""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NewType, ParamSpec, TypeVar

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.core.errors import unusable
from multigrad.ops.dtypes import dtype_of

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    Tensor = Any
else:
    Tensor = NewType("Tensor", object)
"""A tensor of the active backend, for readers of a signature: Keras (3.15) has no type for a checker."""

Pair = tuple[Tensor, Callable[..., Any]]
"""What the function of an op returns: the output, and the rule."""


def as_tensor(value: Any) -> Any:
    """A tensor, with its history, of what can be one; a symbolic tensor as it is.

    `keras.ops.convert_to_tensor` (3.15) makes one without a history of a list of tensors, on PyTorch.
    """
    if isinstance(value, keras.KerasTensor):
        return value
    if isinstance(value, (list, tuple)) and any(map(ops.is_tensor, tree.flatten(value))):
        return ops.stack([as_tensor(part) for part in value])
    return ops.convert_to_tensor(value)


def tensor_of(op: str, argument: str, value: Any) -> Any:
    """The argument as a tensor, and a Variable as it is; a TypeError for anything else, such as None.

    Tensors in a list have gradients of their own inside of a custom gradient, and so are not one argument.
    """
    if isinstance(value, (list, tuple)) and any(hasattr(part, "dtype") for part in tree.flatten(value)):
        fix = "write keras.ops.stack(...) around them, so that the gradient has their shapes"
        raise unusable(TypeError, op, argument, required="one tensor, or numbers", got=value, fix=fix)
    return stacked(op, argument, value)


def stacked(op: str, argument: str, value: Any) -> Any:
    """The argument as a tensor, of what `tensor_of` takes and of tensors in a list: outside of an op."""
    if isinstance(value, keras.Variable):
        return value
    parts = tree.flatten(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, (int, float, complex)) or hasattr(part, "dtype") for part in parts):
        raise unusable(TypeError, op, argument, required="a tensor, or numbers", got=value, fix="pass one")
    return as_tensor(value)


def floating(op: str, argument: str, value: Any) -> Any:
    """The argument as a tensor of a real floating dtype; a TypeError for any other."""
    x = tensor_of(op, argument, value)
    if not keras.backend.is_float_dtype(dtype_of(x)):
        required, fix = "a real floating dtype", "cast it"
        raise unusable(TypeError, op, argument, required=required, got=x, fix=fix)
    return x


def check_axes(op: str, x: Any, axis: Any) -> None:
    """See that `axis` is None, or one or several axes of `x`."""
    sizes = backend.active.sizes(getattr(x, "shape", ()))
    axes = axis if isinstance(axis, (tuple, list)) else () if axis is None else (axis,)
    if sizes is None or all(is_integer(a) and -len(sizes) <= a < len(sizes) for a in axes):
        return
    required = f"None, or one or several of the {len(sizes)} axes of 'x'"
    fix = "count from 0, or from -1 at the end"
    raise unusable(ValueError, op, "axis", required=required, got=axis, fix=fix)


def may_be_alike(shape: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two shapes are the same, as far as TensorFlow knows them, which has None for other sizes."""
    if len(shape) != len(other):
        return False
    return all(None in pair or pair[0] == pair[1] for pair in zip(shape, other, strict=True))


def is_number(value: Any) -> bool:
    """Whether it is a real number of Python's."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether it is an integer of Python's."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A number of NumPy's, or each in a tuple or list, as one of Python's; anything else as it is."""
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    number = isinstance(value, (np.number, np.bool_)) or (isinstance(value, np.ndarray) and not value.shape)
    return value.item() if number else value


def with_plain(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function the numbers of NumPy's in these arguments as Python's own.

    In an op with a custom gradient a number of NumPy's is a tensor, which has a gradient; these are options.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        positional = itertools.takewhile(lambda p: p.kind is not p.VAR_POSITIONAL, parameters)
        chosen = [p.name in names for p in positional]

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            own: Any = [plain(v) if i < len(chosen) and chosen[i] else v for i, v in enumerate(args)]
            named: Any = {name: plain(v) if name in names else v for name, v in kwargs.items()}
            return function(*own, **named)

        return functools.update_wrapper(backend.active.library_code(call), function)

    return decorate
