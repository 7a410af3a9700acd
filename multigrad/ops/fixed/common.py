"""Functions that the fixed ops share."""

import functools
import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar, get_args

import keras
from keras import ops

from multigrad import backend
from multigrad.common.frameworks import DIFFERENTIATING
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.op import op_custom_gradient
from multigrad.ops.arguments import Pair, Tensor, tensor_of
from multigrad.ops.dtypes import cast, dtype_of, has_gradient, wide_dtype

F = TypeVar("F", bound=Callable[..., Any])

EVERY: dict[str, Callable[..., Any]] = {}
"""All fixed ops, by their names in `keras.ops`."""

FAULTS: dict[str, tuple[str, ...]] = {}
"""The backends on which Keras's op (3.15) has a fault, or another convention."""


def replacement(*backends: str, path: str | None = None) -> Callable[[F], F]:
    """Add a function to the fixed ops, with its documentation.

    Arguments:
        backends: the backends on which Keras's op has a fault. The default is all backends.
        path: the name in `keras.ops`, if it is not the name of the function.
    """

    def add(f: F) -> F:
        name = path or f.__name__
        EVERY[name], FAULTS[name] = f, backends or DIFFERENTIATING
        f.__doc__ = documentation(f)
        return f

    return add


def define_op(f: F) -> F:
    """Define an op that a saved model finds."""
    return op_custom_gradient(name=f"multigrad>{f.__name__}")(f)  # type: ignore[return-value]


def by_derivative(
    *backends: str, real_only: bool = False, path: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Define the op that has the value of Keras's op of the same name, and the decorated derivative.

    `derivative(u, y, *arguments)` gets the upstream gradient, the output and the arguments of the op. It
    returns the gradient of the argument that is a tensor, or a tuple of gradients if several are. A gradient
    that may not be needed can be a function of no arguments. The arguments whose annotation contains `Tensor`
    are tensors, numbers or None. `derivative` gets the tensors and numbers in the dtype in which it computes.

    Arguments:
        backends, path: as for `replacement`.
        real_only: whether complex tensors are passed to Keras's op, because the derivative does not support
            them.
    """

    def define(derivative: Callable[..., Any]) -> Any:
        op = _op_of(derivative, path)
        op = _without_complex(op) if real_only else op
        return op if op.__name__.startswith("_") else replacement(*backends, path=path)(op)

    return define


def _op_of(derivative: Callable[..., Any], path: str | None) -> Callable[..., Any]:
    keras_op = attrgetter(path or derivative.__name__.lstrip("_"))  # not every version of Keras has it
    signature = inspect.signature(derivative)
    parameters = list(signature.parameters.values())[2:]
    names = [p.name if Tensor in (p.annotation, *get_args(p.annotation)) else None for p in parameters]
    pull = _Pull(derivative, [name is not None for name in names])

    def f(*arguments: Any) -> Pair:
        pairs = zip(names, arguments, strict=True)
        values = tuple([v if n is None else to_operand(derivative.__name__, n, v) for n, v in pairs])
        y = keras_op(ops)(*values)
        return y, lambda upstream: pull(upstream, y, values)

    functools.update_wrapper(f, derivative)
    f.__signature__ = signature.replace(parameters=parameters, return_annotation=Tensor)  # type: ignore[attr-defined]
    # A code object of its own. Dynamo compiles a limited number of programs for each.
    f.__code__ = f.__code__.replace(co_name=derivative.__name__)
    return define_op(f)


class _Pull(HoldsNoTensor):
    """Computes the gradients of all arguments of an op from its derivative, see `by_derivative`."""

    def __init__(self, derivative: Callable[..., Any], is_tensor: Sequence[bool]) -> None:
        self._derivative, self._is_tensor = derivative, is_tensor

    def __call__(self, upstream: Any, y: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        dtype = wide_dtype(dtype_of(y))
        pairs = list(zip(values, self._is_tensor, strict=True))
        cast_values = [
            cast(value, dtype) if is_tensor and value is not None else value for value, is_tensor in pairs
        ]
        gradients = self._derivative(cast(upstream, dtype), cast(y, dtype), *cast_values)
        remaining = iter(gradients if isinstance(gradients, tuple) else (gradients,))
        own = [(value, next(remaining)) if is_tensor else (None, None) for value, is_tensor in pairs]
        return tuple([gradient if has_gradient(value) else None for value, gradient in own])


def _without_complex(op: Callable[..., Any]) -> Callable[..., Any]:
    """Call Keras's op instead of the fixed op for complex tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(is_complex(value) for value in (*args, *kwargs.values())):
            return getattr(ops, op.__name__)(*args, **kwargs)
        return op(*args, **kwargs)

    return backend.active.update_wrapper(call, op)


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


def to_operand(op: str, argument: str, value: Any) -> Any:
    """Return the argument as a tensor, number or None. A list of tensors raises an error."""
    is_plain = value is None or isinstance(value, (int, float))
    return value if is_plain else tensor_of(op, argument, value)


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
