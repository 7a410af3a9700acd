"""Functions that the fixed ops share."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras
from keras import ops

from multigrad import backend
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import tensor_of
from multigrad.ops.dtypes import cast, dtype_of, has_gradient, wide_dtype

F = TypeVar("F", bound=Callable[..., Any])


def define_replacement(f: F) -> F:
    """Define the op that replaces Keras's op of the same name, with its documentation."""
    op: Any = op_custom_gradient(name=f"multigrad>{f.__name__}")(f)
    op.__doc__ = documentation(f)
    return op


def real_only(f: F) -> F:
    """Call Keras's op instead of the fixed op for complex tensors, which the rule does not support."""
    op = define_replacement(f)

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(is_complex(value) for value in (*args, *kwargs.values())):
            return getattr(ops, f.__name__)(*args, **kwargs)
        return op(*args, **kwargs)

    return backend.active.update_wrapper(call, op)  # type: ignore[return-value]


def documentation(f: Callable[..., Any]) -> str:
    """Return the first sentence of Keras's documentation of an op, and what multigrad changes."""
    name = f.__name__.lstrip("_")
    keras_doc = (getattr(ops, name, f).__doc__ or "").strip().split("\n\n")[0]
    derivative = (f.__doc__ or "").strip()
    return f"{keras_doc}\n\n    As `keras.ops.{name}`, with this derivative: {derivative}\n    "


def is_complex(value: Any) -> bool:
    """Return whether a value is a complex number or tensor."""
    if isinstance(value, complex):
        return True
    dtype = getattr(value, "dtype", None)
    return dtype is not None and keras.backend.standardize_dtype(dtype).startswith("complex")


def operands(y: Any, *values: Any) -> list[Any]:
    """Return arguments in the dtype in which the rule of an op with the output `y` computes."""
    dtype = wide_dtype(dtype_of(y))
    return [cast(value, dtype) for value in values]


def entries(*pairs: tuple[Any, Callable[[], Any]]) -> Any:
    """Return the answer of a rule: the gradient of each argument that has one, else None."""
    return tuple(gradient() if has_gradient(value) else None for value, gradient in pairs)


def tensors(op: str, **arguments: Any) -> list[Any]:
    """Return the arguments as tensors, numbers or None. A list of tensors raises an error."""
    return [
        value if value is None or isinstance(value, (int, float)) else tensor_of(op, name, value)
        for name, value in arguments.items()
    ]


def keep_axes(x: Any, axis: Any, y: Any) -> Any:
    """Return a result of a reduction of `x` with the reduced axes, of size 1."""
    reduced = axes_of(x, axis)
    return ops.reshape(y, [1 if i in reduced else size for i, size in enumerate(ops.shape(x))])


def axes_of(x: Any, axis: Any) -> list[int]:
    """Return the axes of `x` that an argument `axis` names, as numbers that are not negative."""
    count = len(x.shape)
    axes = range(count) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    return [a % count for a in axes] if count else []


def divide(x: Any, y: Any) -> Any:
    """Return `x / y`, and zero where `y` is zero, with all derivatives. Divide once per element of `y`."""
    return x * quotient(ops.ones_like(y), y)


def quotient(x: Any, y: Any) -> Any:
    """Return `x / y`, and zero where `y` is zero, with all derivatives."""
    zero = ops.equal(y, 0.0)
    safe = ops.where(zero, ops.ones_like(y), y)
    ratio = x / safe
    return ops.where(zero, ops.zeros_like(ratio), ratio)
