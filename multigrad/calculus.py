"""Gradients of functions, the same on whichever backend is active, in the conventions of JAX."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

from multigrad import backend
from multigrad.binding import name_of
from multigrad.errors import describe, message, shape_text


def grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The gradient of a function that returns a scalar.

    ```python
    from keras import ops
    import multigrad

    df = multigrad.grad(lambda x: ops.sum(x ** 3))
    print(df(ops.array([1.0, 2.0])))  # [3., 12.]
    d2f = multigrad.grad(multigrad.grad(lambda x: x ** 3))
    print(d2f(2.0))  # 12.0
    ```

    Arguments:
        f: a function of tensors, NumPy arrays, Python floats, Keras Variables and nested structures of
            them, which returns a real scalar tensor.
        argnums: the position of the argument to differentiate by, or several.
        has_aux: whether `f` returns a pair `(scalar, aux)`, of which only the first is differentiated.

    Returns:
        A function of the same arguments. It returns the gradient in the structure, shapes and dtypes of
        the argument; a tuple of them where `argnums` is a sequence; `(gradient, aux)` with `has_aux`.

    Raises:
        TypeError: when an argument that is to be differentiated holds something other than floating or
            complex tensors, or `f` returns no real scalar.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    both = value_and_grad(f, argnums, has_aux)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        answer, gradients = both(*args, **kwargs)
        return (gradients, answer[1]) if has_aux else gradients

    return functools.update_wrapper(backend.active.library_code(gradient), f)


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """The value of a function that returns a scalar, and its gradient.

    ```python
    from keras import ops
    import multigrad

    value, gradient = multigrad.value_and_grad(lambda x: ops.sum(x ** 2))(ops.array([3.0]))
    print(value, gradient)  # 9.0, [6.]
    ```

    Arguments:
        f, argnums, has_aux: as for `grad`.

    Returns:
        A function of the same arguments. It returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`.

    Raises:
        TypeError, NotImplementedError: as for `grad`.
    """
    name = name_of(f)
    single = not isinstance(argnums, Sequence)
    places = list(argnums) if isinstance(argnums, Sequence) else [operator.index(argnums)]

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        positions = [_position(name, place, len(args)) for place in places]
        structures = [args[position] for position in positions]
        tensors = [
            _differentiable(name, position, leaf)
            for position, structure in zip(positions, structures, strict=True)
            for leaf in tree.flatten(structure)
        ]

        def scalar(*tensors: Any) -> tuple[Any, Any]:
            own = list(args)
            for position, part in zip(positions, _parts(structures, tensors), strict=True):
                own[position] = part
            answer = f(*own, **kwargs)
            if not has_aux:
                return _scalar(name, answer), None
            if not isinstance(answer, (tuple, list)) or len(answer) != 2:
                raise TypeError(
                    message(
                        name,
                        "has_aux=True, and the function returned no pair",
                        required="(scalar, aux)",
                        got=describe(answer),
                        mend="return a pair, or leave has_aux out",
                    )
                )
            return _scalar(name, answer[0]), answer[1]

        (value, aux), gradients = backend.active.value_and_grad(scalar, tensors)
        parts = _parts(structures, gradients)
        gradient = parts[0] if single else tuple(parts)
        return ((value, aux) if has_aux else value), gradient

    return functools.update_wrapper(backend.active.library_code(value_and_gradient), f)


def _position(name: str, place: int, count: int) -> int:
    if -count <= place < count:
        return place % count
    raise TypeError(
        message(
            name,
            "there is no such argument to differentiate by",
            required=f"a position among the {count} positional argument(s) of the call",
            got=f"argnums {place}",
            mend="pass the argument by position, or correct argnums",
        )
    )


def _differentiable(name: str, position: int, leaf: Any) -> Any:
    """A leaf of an argument as a tensor that has a gradient."""
    numbers = backend.active.CONVERTIBLE[type(leaf)] or isinstance(leaf, (float, complex))
    if numbers or ops.is_tensor(leaf):
        tensor = backend.active.as_tensor(leaf)
        if _is_inexact(tensor):
            return tensor
    raise TypeError(
        message(
            name,
            "a gradient was asked for by something that has none",
            argument=f"number {position}",
            required="floating or complex tensors, arrays or numbers",
            got=describe(leaf),
            mend="pass floats, or leave the argument out of argnums",
        )
    )


def _is_inexact(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype).startswith(("float", "bfloat", "complex"))


def _parts(structures: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    # Not tree.map_structure: on PyTorch (Keras 3.15) it goes through a dict in another order than flatten.
    remaining = iter(leaves)
    return [tree.pack_sequence_as(s, [next(remaining) for _ in tree.flatten(s)]) for s in structures]


def _scalar(name: str, value: Any) -> Any:
    tensor = backend.active.as_tensor(value)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if tuple(ops.shape(tensor)) == () and dtype.startswith(("float", "bfloat")):
        return tensor
    raise TypeError(
        message(
            name,
            "the gradient of something that is no real scalar was asked for",
            required="a floating value of shape ()",
            got=f"{dtype} of shape {shape_text(ops.shape(tensor))}",
            mend="reduce the output, for example with ops.sum or ops.mean",
        )
    )
