"""A function of structures as one of flat tensors: differentiable inputs to differentiable outputs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.answer import slot_paths
from multigrad.binding import name_of, signature_of
from multigrad.errors import describe, distinct_names, message
from multigrad.leaves import Layout, Refused, split
from multigrad.variables import Pinned, Reads


class Flat:
    """A function, and the place at which it is looked at.

    ```python
    flat = Flat(lambda x, n: {"y": x**n}, (3.0, 2), dtype="own")
    assert flat.input_names == ["'x'"] and flat.output_names == ["output['y']"]
    (y,) = flat(*flat.inputs)
    print(y)  # 9.0
    ```

    It is run twice, to see which trainable variables it reads, whose values are inputs behind those of the
    arguments, and what it returns. What it assigns to variables is lost, in every run.

    Arguments:
        fn, args: the function and its arguments. Floats among them are inputs, as arrays are.
        variables: Keras Variables to take as inputs; those that are trainable and read, where it is None.
        dtype: the floating dtype in which the arguments are to be, complex ones in its complex counterpart.
            None for float64; or, where there are variables, for "own": layers compute in a dtype of theirs.
            With "own", all keep theirs; variables always do.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        variables: Sequence[keras.Variable] | None = None,
        dtype: str | None = None,
    ) -> None:
        self.name = name_of(fn)
        self._fn = fn
        _, binding = signature_of(fn).bind(tuple(args), {})
        named = list(zip(binding.names(), args, strict=False))
        self._variables, self._stateful = self._read(self._split(tuple(args), named), variables)
        self._tensors, self._layout = self._split(_with_tensors(tuple(args)), named)
        paths = _paths(self._layout, [name for name, _ in named])
        self._places = [i for i, t in enumerate(self._tensors) if backend.active.is_differentiable(t)]
        if dtype is None and not self._variables:
            dtype = "float64"
        own = [_cast(self._tensors[place], dtype) for place in self._places]
        own += [backend.active.as_tensor(variable) for variable in self._variables]
        self.inputs = [backend.active.snapshot(tensor) for tensor in own]  # without a history
        own_paths = [f"variable {variable.path!r}" for variable in self._variables]
        self.input_names = distinct_names([*[paths[place] for place in self._places], *own_paths])
        self._look(args)

    def _look(self, args: Sequence[Any]) -> None:
        """Run it once, and name the outputs."""
        with self._scope(self.inputs):
            output = self._fn(*self._args(self.inputs))
        tensors, layout = self._split(output, [("the output", output)])
        paths = _paths(layout, ["output"], whole=True)
        floating = [backend.active.is_differentiable(tensor) for tensor in tensors]
        self.all_outputs = dict(zip(paths, tensors, strict=True))
        self.output_names = [path for path, f in zip(paths, floating, strict=True) if f]
        if not self.inputs or not self.output_names:
            missing = "output" if self.inputs else "argument"
            raise TypeError(
                message(
                    self.name,
                    f"there is no {missing} that has a gradient",
                    required=f"a floating or complex tensor in the {missing}s",
                    got=describe(output) if self.inputs else describe(args),
                    mend="pass floats" if missing == "argument" else "return floats",
                )
            )

    def __call__(self, *inputs: Any) -> list[Any]:
        """The differentiable outputs for these inputs."""
        with self._scope(inputs):
            return self._of_tensors(*inputs)

    def compiled(self) -> Callable[..., list[Any]]:
        """The same by the framework's compiler."""
        run = backend.active.compiled(self._of_tensors)

        def scoped(*inputs: Any) -> list[Any]:
            with self._scope(inputs):
                return run(*inputs)

        return scoped

    def _of_tensors(self, *inputs: Any) -> list[Any]:
        tensors, _ = split(self._fn(*self._args(inputs)))
        return [tensor for tensor in tensors if backend.active.is_differentiable(tensor)]

    def _read(
        self, arguments: tuple[Sequence[Any], Layout], variables: Sequence[keras.Variable] | None
    ) -> tuple[list[keras.Variable], bool]:
        """The variables that are inputs, and whether the function has to do with variables at all."""
        tensors, layout = arguments
        with Pinned((), (), keep=False), Reads() as scope:
            self._fn(*layout.join(tensors))
        read = scope.read()
        if variables is None:
            variables = [variable for variable in read if isinstance(variable, keras.Variable)]
        return list(variables), bool(variables or read or scope.assigned)

    def _scope(self, inputs: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        if not self._stateful:  # under a scope, PyTorch (2.13) compiles no rule
            return contextlib.nullcontext()
        return Pinned(self._variables, inputs[len(self._places) :], keep=False)

    def _args(self, inputs: Sequence[Any]) -> Any:
        tensors = list(self._tensors)
        for place, tensor in zip(self._places, inputs, strict=False):
            tensors[place] = tensor
        return self._layout.join(tensors)

    def _split(self, structure: Any, named: Sequence[tuple[str, Any]]) -> tuple[Sequence[Any], Layout]:
        try:
            return split(structure)
        except Refused as refused:
            raise refused.error(self.name, named) from None


def _with_tensors(args: tuple[Any, ...]) -> Any:
    """The arguments with tensors in place of floats, in the dtype of the first floating array."""
    leaves = tree.flatten(args)
    dtypes = [keras.backend.standardize_dtype(leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype")]
    dtype = next((dtype for dtype in dtypes if dtype in RESOLUTIONS), keras.config.floatx())
    return tree.pack_sequence_as(args, [_with_tensor(leaf, dtype) for leaf in leaves])


def _with_tensor(leaf: Any, dtype: str) -> Any:
    if type(leaf) is float:
        return ops.convert_to_tensor(leaf, dtype=dtype)
    return backend.active.as_tensor(leaf) if type(leaf) is complex else leaf


def _paths(layout: Layout, names: Sequence[str], whole: bool = False) -> list[str]:
    """How messages call each tensor of a layout."""
    parts = [layout.template] if whole else layout.template
    found = sorted(slot_paths(zip(names, parts, strict=True)), key=lambda pair: pair[1])
    return [path for path, _ in found]


def _cast(tensor: Any, dtype: str | None) -> Any:
    if dtype in (None, "own"):
        return tensor
    if keras.backend.standardize_dtype(tensor.dtype).startswith("complex"):
        dtype = "complex128" if dtype == "float64" else "complex64"
    return ops.cast(tensor, dtype)


def vjp(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any]
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    """The outputs of a function of flat tensors, and its pullback, without anything around it."""
    (outputs, _), pullback = backend.active.vjp(lambda *own: (function(*own), None), list(inputs))
    return outputs, pullback


def values(tensor: Any) -> np.ndarray:
    """The numbers of a tensor, in double precision."""
    found = backend.active.concrete(tensor)
    assert found is not None, "a traced tensor has no value"
    return np.array(found, np.complex128 if np.iscomplexobj(found) else np.float64)


RESOLUTIONS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number of a dtype."""

_REAL = {"complex64": "float32", "complex128": "float64"}


def precision_of(tensors: Sequence[Any]) -> str:
    """The real dtype of the tensor with the fewest digits; float64 where none is floating."""
    names = [keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors]
    dtypes = [_REAL.get(name, name) for name in names]
    return max(["float64", *[dtype for dtype in dtypes if dtype in RESOLUTIONS]], key=RESOLUTIONS.__getitem__)


def like(numbers: Sequence[np.ndarray], tensors: Sequence[Any]) -> list[Any]:
    """Arrays as tensors, in the dtypes of others."""
    return [
        ops.convert_to_tensor(array, dtype=keras.backend.standardize_dtype(tensor.dtype))
        for array, tensor in zip(numbers, tensors, strict=True)
    ]


def directions(tensors: Sequence[Any], seed: int) -> Iterator[np.ndarray]:
    """Fixed pseudo-random numbers like the tensors: of either sign, and none of them close to zero."""
    generator = np.random.default_rng(seed)
    for tensor in tensors:
        shape = tuple(tensor.shape)
        numbers = generator.uniform(1.0, 2.0, shape) * generator.choice((-1.0, 1.0), shape)
        turn = np.exp(1j * generator.uniform(0.0, 1.0, shape)) if np.iscomplexobj(values(tensor)) else 1.0
        yield np.asarray(numbers * turn)
