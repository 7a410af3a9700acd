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
from multigrad.variables import Pinned


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
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
        argnums: the position of the argument to differentiate by, or several. If it is not given, the
            first argument, or none where `variables` are.
        has_aux: whether `f` returns a pair `(scalar, aux)`, of which only the first is differentiated.
        variables: Keras Variables that `f` reads, to differentiate by.

    Returns:
        A function of the same arguments. It returns the gradient in the structure, shapes and dtypes of
        the argument; a tuple of them where `argnums` is a sequence. With `variables`, it returns the list
        of their gradients, or `(gradient, gradients_of_variables)` with both. With `has_aux`, all of this
        is the first of a pair whose second is the aux.

    Raises:
        TypeError: when an argument or variable that is to be differentiated holds something other than
            floating or complex tensors, or `f` returns no real scalar.
        NotImplementedError: on the NumPy and OpenVINO backends.
    """
    both = value_and_grad(f, argnums, has_aux, variables)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        answer, gradients = both(*args, **kwargs)
        return (gradients, answer[1]) if has_aux else gradients

    return functools.update_wrapper(backend.active.library_code(gradient), f)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    variables: Sequence[keras.Variable] | None = None,
) -> Callable[..., Any]:
    """The value of a function that returns a scalar, and its gradient.

    ```python
    import keras
    from keras import ops
    import multigrad

    value, gradient = multigrad.value_and_grad(lambda x: ops.sum(x ** 2))(ops.array([3.0]))
    print(value, gradient)  # 9.0, [6.]

    scale = keras.Variable(2.0)
    step = multigrad.value_and_grad(lambda x: ops.sum(x * scale), variables=[scale])
    value, gradients = step(ops.array([3.0]))
    print(value, gradients[0])  # 6.0, 3.0
    ```

    What `f` assigns to variables is kept.

    Arguments:
        f, argnums, has_aux, variables: as for `grad`.

    Returns:
        A function of the same arguments. It returns `(value, gradient)`, or `((value, aux), gradient)`
        with `has_aux`.

    Raises:
        TypeError, NotImplementedError: as for `grad`.
    """
    name = name_of(f)
    by = [] if variables is None else _distinct(name, variables)
    if argnums is None and variables is None:
        argnums = 0
    single = not isinstance(argnums, Sequence)
    places: list[int] = []
    if isinstance(argnums, Sequence):
        places = list(argnums)
    elif argnums is not None:
        places = [operator.index(argnums)]

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        positions = [_position(name, place, len(args)) for place in places]
        structures = [args[position] for position in positions]
        tensors = [
            _differentiable(name, f"number {position}", leaf)
            for position, structure in zip(positions, structures, strict=True)
            for leaf in tree.flatten(structure)
        ]
        count = len(tensors)
        tensors += [_differentiable(name, f"variable {v.path!r}", v) for v in by]
        assigned: list[keras.Variable] = []

        def scalar(*tensors: Any) -> tuple[Any, Any]:
            own = list(args)
            for position, part in zip(positions, _parts(structures, tensors), strict=True):
                own[position] = part
            with Pinned(by, tensors[count:], keep=False) as scope:
                answer = f(*own, **kwargs)
            assigned[:] = [variable for variable, _ in scope.assigned.values()]
            value, aux = _pair(name, answer) if has_aux else (answer, None)
            return _scalar(name, value), (aux, [new for _, new in scope.assigned.values()])

        (value, (aux, news)), gradients = backend.active.value_and_grad(scalar, tensors, len(by))
        for variable, new in zip(assigned, news, strict=True):
            variable.assign(new)
        parts = _parts(structures, gradients)
        gradient = parts[0] if single and parts else tuple(parts)
        if variables is not None:
            of_variables = list(gradients[count:])
            gradient = of_variables if argnums is None else (gradient, of_variables)
        return ((value, aux) if has_aux else value), gradient

    return functools.update_wrapper(backend.active.library_code(value_and_gradient), f)


def _distinct(name: str, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    for i, variable in enumerate(variables):
        other = not isinstance(variable, keras.Variable)
        if other or any(variable is earlier for earlier in variables[:i]):
            raise TypeError(
                message(
                    name,
                    "there is something in `variables` by which a gradient cannot be taken",
                    argument=f"'variables'[{i}]",
                    required="Keras Variables, each of them once",
                    got=describe(variable) if other else f"variable {variable.path!r} a second time",
                    mend="pass, for example, the trainable_variables of a model",
                )
            )
    return list(variables)


def _pair(name: str, answer: Any) -> tuple[Any, Any]:
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        return answer[0], answer[1]
    raise TypeError(
        message(
            name,
            "has_aux=True, and the function returned no pair",
            required="(scalar, aux)",
            got=describe(answer),
            mend="return a pair, or leave has_aux out",
        )
    )


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


def _differentiable(name: str, argument: str, leaf: Any) -> Any:
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
            argument=argument,
            required="floating or complex tensors, arrays or numbers",
            got=describe(leaf),
            mend="pass floats, or leave it out of what is differentiated by",
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
