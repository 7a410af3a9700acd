"""`vmap`: a function of single elements as a function of batches.

`vmap` moves the mapped axes to the front, and flattens the arguments and results of the function, which
`multigrad.backend` maps along the first axis of flat tensors.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from multigrad import backend
from multigrad.backend.base import dependence_error
from multigrad.common.errors import describe, message, require_function, unusable
from multigrad.core.conversions import arrays_to_tensors, number_to_tensor
from multigrad.core.leaves import is_converted_type, to_tensor
from multigrad.core.signature import name_of
from multigrad.core.structure import Layout, Slot, children, leaves_of, outline, rebuild, split
from multigrad.core.variables import Pinned

Axes = int | None | Sequence[Any] | Mapping[Any, Any]
"""An axis, None, or a nested structure of them, such as `(0, {"x": 1, "y": None})`."""


def vmap(f: Callable[..., Any], in_axes: Axes = 0, out_axes: Axes = 0) -> Callable[..., Any]:
    """Return a function that maps a function of single elements over batches.

    ```python
    from keras import ops
    import multigrad

    def loss(w, x, y):
        return (ops.sum(w * x) - y) ** 2

    w, xs, ys = ops.array([1.0, 2.0]), ops.array([[1.0, 0.0], [0.0, 1.0]]), ops.array([0.0, 1.0])
    print(multigrad.vmap(loss, in_axes=(None, 0, 0))(w, xs, ys))  # [1., 1.]
    gradients = multigrad.vmap(multigrad.grad(loss), in_axes=(None, 0, 0))
    print(gradients(w, xs, ys))  # [[2., 0.], [0., 2.]]
    ```

    - JAX: `jax.vmap`. PyTorch: `torch.func.vmap`.
    - TensorFlow: `tf.vectorized_map`. It loses the rules of ops for derivatives of the mapped function.
      If a derivative is being recorded around `vmap`, and the function calls an op or another function with a
      custom gradient, `vmap` calls `tf.map_fn`, a loop, which keeps the rules. A gradient inside `f` is
      always vectorized with its rule.
    - NumPy and OpenVINO: a loop.

    `vmap` can be nested, compiled and differentiated. Each element gets the same random numbers, and the seed
    generator advances once. For different numbers, draw them outside, and map over them. For zero elements,
    `f` runs on one element, of the numbers 0.5 or 0, and the results are empty.

    Arguments:
        f: a function of tensors, NumPy arrays, Keras Variables and nested structures of them. It gets one
            element of each mapped argument, and all other arguments unchanged, except that floating NumPy
            arrays become tensors. It returns a nested structure of tensors, numbers and None. It may assign
            to variables only values that are the same for all elements.
        in_axes: the axis along which each positional argument is mapped, and None for an argument that is
            not mapped. An integer or None applies to all arguments. Otherwise, pass a tuple or list with one
            entry per argument. An entry can be a nested structure like a part of the argument. Arguments that
            are passed by keyword are mapped along axis 0.
        out_axes: the axis of the results along which the elements are stacked: an integer or None, or a
            nested structure like a part of the output. A result that is the same for all elements is
            repeated. With None, it is returned once.

    Returns:
        A function with the arguments of `f`, with a further axis in each mapped tensor. It returns the output
        of `f`, with a further axis in each tensor.

    Raises:
        TypeError: if a mapped argument contains anything but tensors, arrays and None; if the structure of
            `in_axes` or `out_axes` does not match; if `f` returns anything but tensors, numbers and None.
        ValueError: if no argument is mapped; if the sizes of the mapped axes differ; if an axis is out of
            range; if a result with `out_axes` of None, or a value that is assigned to a variable, depends on
            a mapped argument.

    References:
        The signature is that of [`jax.vmap`](https://docs.jax.dev/en/latest/_autosummary/jax.vmap.html).
    """
    require_function("multigrad.vmap", "f", f)
    name = name_of(f)
    _require_axes(name, "in_axes", in_axes)
    _require_axes(name, "out_axes", out_axes)

    def map_elements(*args: Any, **kwargs: Any) -> Any:
        function = _MappedFunction(name, f, in_axes, out_axes, args, kwargs)
        # PyTorch (2.13) and TensorFlow (2.21) cannot map no elements.
        is_empty = any(0 in shape[:1] for shape in _shapes_of(function.tensors))
        tensors = list(map(_one_element, function.tensors)) if is_empty else function.tensors
        stacked, shared = backend.active.vmap(function, tensors)
        return function.join([result[:0] for result in stacked] if is_empty else stacked, shared)

    return backend.active.update_wrapper(map_elements, f)


class _MappedFunction:
    """A function of the flat elements of one call. `tensors` have the mapped axes in front.

    It returns the results that are stacked, and those that are the same for all elements. The latter include
    the values that it assigned to variables.
    """

    _layout: Layout
    _axes: list[int | None]
    _variables: list[keras.Variable]

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        in_axes: Axes,
        out_axes: Axes,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._name, self._f, self._out_axes, self._arguments = name, f, out_axes, (args, kwargs)
        self.__name__ = name  # for PyTorch's errors
        self.tensors: list[Any] = []
        self._leaves: list[tuple[bool, Any]] = []
        """Whether each leaf of the arguments is mapped, and the leaf if it is not."""
        axes = _axes_of_arguments(name, in_axes, args)
        for axis, leaf in itertools.zip_longest(axes, leaves_of(self._arguments), fillvalue=0):
            if axis is None or leaf is None:
                self._leaves.append((False, arrays_to_tensors(leaf)))
            else:
                self._leaves.append((True, None))
                tensor = _as_tensor(name, leaf)
                self.tensors.append(_move(tensor, _in_range(name, "in_axes", axis, tensor), 0))
        if not self.tensors:
            required, fix = "at least one tensor in an argument with an axis", "set an axis in in_axes"
            raise unusable(ValueError, name, "in_axes", required=required, got=in_axes, fix=fix)
        _require_equal_sizes(name, self.tensors)

    def __call__(self, *elements: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        remaining, leaves = iter(elements), iter(self._leaves)

        def take(_: Any) -> Any:
            is_mapped, constant = next(leaves)
            return next(remaining) if is_mapped else constant

        args, kwargs = rebuild(self._arguments, take)
        if backend.active.is_reading_code():  # Dynamo records assignments itself
            output, assigned = self._f(*args, **kwargs), []
        else:
            with Pinned([], []) as scope:
                output = self._f(*args, **kwargs)
            assigned = list(scope.assigned.values())
        output = rebuild(output, functools.partial(_as_result, self._name))
        axes = _axes(self._name, "out_axes", self._out_axes, output)
        tensors, self._layout = split(output)
        pairs = zip(axes, leaves_of(output), strict=True)
        self._axes = [axis for axis, leaf in pairs if leaf is not None]
        self._variables = [variable for variable, _ in assigned]
        stacked = [tensor for axis, tensor in zip(self._axes, tensors, strict=True) if axis is not None]
        shared = [tensor for axis, tensor in zip(self._axes, tensors, strict=True) if axis is None]
        shared += [backend.active.as_tensor(value) for _, value in assigned]
        self._require_independent(shared, elements)
        return stacked, shared

    def _require_independent(self, shared: Sequence[Any], elements: Sequence[Any]) -> None:
        """Raise if a result that is returned once, or a value that is assigned, depends on an element."""
        names = [f"the variable {variable.path!r}" for variable in self._variables]
        names = [*["a result with out_axes of None"] * (len(shared) - len(names)), *names]
        pairs = zip(names, shared, strict=True)
        if mapped := [name for name, value in pairs if backend.active.depends_on_element(value, elements)]:
            raise ValueError(dependence_error(self._name, ", ".join(mapped)))

    def join(self, stacked: Sequence[Any], shared: Sequence[Any]) -> Any:
        """Return the output with these results, and assign to variables."""
        next_stacked, next_shared = iter(stacked), iter(shared)
        tensors = []
        for axis in self._axes:
            tensor = next(next_shared if axis is None else next_stacked)
            if axis is not None:
                tensor = _move(tensor, 0, _in_range(self._name, "out_axes", axis, tensor))
            tensors.append(tensor)
        for variable, value in zip(self._variables, next_shared, strict=True):
            backend.active.assign(variable, value)
        return self._layout.join(tensors)


def _move(tensor: Any, source: int, destination: int) -> Any:
    if source == destination:
        return tensor
    # Not `ops.moveaxis`, which PyTorch (2.13) cannot map.
    axes = [axis for axis in range(len(tensor.shape)) if axis != source]
    return ops.transpose(tensor, [*axes[:destination], source, *axes[destination:]])


def _one_element(tensor: Any) -> Any:
    """Return a tensor with one element in place of no elements.

    It contains 0.5, which few functions refuse, and in integers 0, a valid index.
    """
    element = ops.cast(ops.full((1, *tensor.shape[1:]), 0.5), tensor.dtype)
    return ops.concatenate([tensor, element])


def _axes_of_arguments(name: str, in_axes: Axes, args: tuple[Any, ...]) -> list[int | None]:
    """Return the axis of each leaf of the positional arguments."""
    if isinstance(in_axes, Sequence) and len(in_axes) != len(args):
        required = f"an axis, or a tuple with {len(args)} entries, as there are positional arguments"
        fix = "pass one entry per positional argument, None for an argument that is not mapped"
        raise unusable(ValueError, name, "in_axes", required=required, got=in_axes, fix=fix)
    return _axes(name, "in_axes", in_axes, args)


def _axes(name: str, argument: str, axes: Axes, structure: Any) -> list[int | None]:
    """Return the axis of each leaf of a structure, in the order of its leaves."""
    indices = itertools.count()
    found = dict(_match(name, argument, axes, rebuild(structure, lambda _: Slot(next(indices)))))
    return [found[index] for index in range(len(found))]


def _match(name: str, argument: str, axes: Axes, numbered: Any) -> Iterator[tuple[int, int | None]]:
    """Yield the number of each leaf of a structure, with its axis."""
    if axes is None or isinstance(axes, int):
        yield from [(slot, axes) for slot in leaves_of(numbered)]
        return
    if not isinstance(numbered, (Mapping, tuple, list)) or children(numbered).keys() != children(axes).keys():
        required = f"an axis, None, or a structure like {outline(numbered)}"
        fix = "pass one axis, or a structure of axes with the containers and keys of the value"
        raise unusable(TypeError, name, argument, required=required, got=axes, fix=fix)
    parts = children(numbered)
    for key, part in children(axes).items():
        yield from _match(name, argument, part, parts[key])


def _require_axes(name: str, argument: str, axes: Axes) -> None:
    """Raise unless the axes are integers and None, in containers."""
    are_axes = all([leaf is None or isinstance(leaf, int) for leaf in leaves_of(axes)])
    if not are_axes or (argument == "in_axes" and isinstance(axes, Mapping)):
        required = "an integer, None, or a tuple or list of them, which may hold further containers"
        fix = f"pass {argument}=0, or {argument}=(0, None)"
        raise unusable(TypeError, name, argument, required=required, got=axes, fix=fix)


def _as_tensor(name: str, leaf: Any) -> Any:
    """Return a leaf of a mapped argument as a tensor."""
    if backend.active.TENSORS[type(leaf)] or is_converted_type(type(leaf)):
        return to_tensor(leaf)
    problem = "a mapped argument is not an array"
    required = "tensors, arrays, Keras Variables and None in each argument that is mapped"
    fix = "set its axis to None in in_axes; an argument by keyword is always mapped, so pass it by position"
    raise TypeError(message(name, problem, required=required, got=describe(leaf), fix=fix))


def _as_result(name: str, leaf: Any) -> Any:
    """Return a leaf of the output as a tensor or None."""
    if leaf is None or backend.active.TENSORS[type(leaf)]:
        return leaf
    if is_converted_type(type(leaf)) or isinstance(leaf, (int, float, complex)):
        return to_tensor(number_to_tensor(leaf))
    problem = "a result cannot be stacked"
    required, fix = "tensors, numbers and None in the output of a mapped function", "return the tensors only"
    raise TypeError(message(name, problem, required=required, got=describe(leaf), fix=fix))


def _in_range(name: str, argument: str, axis: int, tensor: Any) -> int:
    """Return an axis of a mapped tensor as a positive number."""
    sizes = backend.active.sizes(tensor.shape)
    if sizes is None:  # TensorFlow does not know the rank
        return axis
    if -len(sizes) <= axis < len(sizes):
        return axis % len(sizes)
    required = f"an axis of a {describe(tensor)}"
    fix = "correct the axis, or set it to None for a tensor that is not mapped"
    raise unusable(ValueError, name, argument, required=required, got=axis, fix=fix)


def _shapes_of(tensors: Sequence[Any]) -> list[tuple[int | None, ...]]:
    """Return the shapes of the tensors whose rank is known."""
    shapes = [backend.active.sizes(tensor.shape) for tensor in tensors]
    return [shape for shape in shapes if shape is not None]


def _require_equal_sizes(name: str, tensors: Sequence[Any]) -> None:
    """Raise if the known sizes of the first axes differ."""
    sizes = {shape[0] for shape in _shapes_of(tensors) if shape[0] is not None}
    if len(sizes) > 1:
        problem = "the sizes of the mapped axes differ"
        required = "the same number of elements in each mapped argument"
        got = f"{', '.join(map(str, sorted(sizes)))} elements"
        fix = "correct in_axes, with None for an argument that is not mapped"
        raise ValueError(message(name, problem, required=required, got=got, fix=fix))
