"""A user's function and the variables that it reads, as a flat function with named inputs and outputs."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops, tree

from multigrad import backend
from multigrad.calculus.flat_structure import FlatStructure, flatten
from multigrad.common.errors import describe, distinct_names, message
from multigrad.core.expected_gradients import paths_of
from multigrad.core.leaves import Refused
from multigrad.core.signature import name_of, signature_of
from multigrad.core.structure import Layout
from multigrad.core.variables import Pinned, Reads
from multigrad.ops.dtypes import EPSILON

_NOT_DIFFERENTIABLE = (int, str, bytes, type(None))
"""Types of arguments that have no gradient, and hold no variables."""


class CheckedFunction:
    """A function of its differentiable inputs, which returns its differentiable outputs.

    ```python
    flat = CheckedFunction(lambda x, n: {"y": x**n}, (3.0, 2), dtype="own")
    assert flat.input_names == ["'x'"] and flat.output_names == ["output['y']"]
    (y,) = flat(*flat.inputs)
    print(y)  # 9.0
    ```

    The inputs are the differentiable tensors in the arguments, followed by the values of variables. To find
    the variables and the outputs, the constructor runs the function twice. Values that the function assigns
    to variables are discarded in every run.

    Arguments:
        fn, args: the function and its arguments. Python floats in them are inputs, as arrays are.
        variables: Keras Variables to use as inputs. The default is the trainable variables that the function
            reads.
        dtype: the floating dtype to cast the arguments to; complex arguments are cast to the corresponding
            complex dtype. With "own" the arguments keep their dtypes. The default is "own" if there are
            variables, because layers compute in the dtype of their variables, and float64 otherwise.
            Variables keep their dtypes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        variables: Sequence[keras.Variable] | None = None,
        dtype: str | None = None,
    ) -> None:
        self.name, self._fn = name_of(fn), fn
        _, binding = signature_of(fn).bind(tuple(args), {})
        named = list(zip(binding.names(), args, strict=False))
        if variables is None:
            self._require_tensor(named)
        self._arguments = self._flatten(_floats_to_tensors(tuple(args)), named)
        tensors = [_cast(tensor, dtype) for tensor in self._arguments.differentiable]
        self.variables, self._uses_variables = self._find_variables(
            self._arguments.unflatten(tensors), variables
        )
        if dtype is None and not self.variables:
            tensors = [_cast(tensor, "float64") for tensor in tensors]
        tensors += [backend.active.as_tensor(variable) for variable in self.variables]
        self.inputs = [backend.active.snapshot(tensor) for tensor in tensors]  # detached from any tape
        paths = _paths(self._arguments.layout, [name for name, _ in named])
        names = list(itertools.compress(paths, self._arguments.is_differentiable))
        names += [f"variable {variable.path!r}" for variable in self.variables]
        self.input_names = distinct_names(names)
        self._name_outputs(args)

    def _require_tensor(self, named: Sequence[tuple[str, Any]]) -> None:
        """Raise if the arguments are only integers and strings, before the function is called."""
        leaves = [leaf for _, arg in named for leaf in tree.flatten(arg)]
        if named and all(isinstance(leaf, _NOT_DIFFERENTIABLE) for leaf in leaves):
            fix = "pass floats, such as np.array([1.0, 2.0]), or pass the `variables`"
            name, arg = named[0]
            raise self._not_differentiable("argument", arg, fix, name)

    def _not_differentiable(self, role: str, got: Any, fix: str, argument: str | None = None) -> TypeError:
        problem, required = f"no {role} is differentiable", f"a floating or complex tensor in the {role}s"
        return TypeError(
            message(self.name, problem, argument=argument, required=required, got=describe(got), fix=fix)
        )

    def _name_outputs(self, args: Sequence[Any]) -> None:
        """Run the function once, and set `all_outputs` and `output_names`."""
        structure = self._call(self.inputs)
        paths = _paths(structure.layout, ["output"], is_single=True)
        self.all_outputs = dict(zip(paths, structure.tensors, strict=True))
        self.output_names = list(itertools.compress(paths, structure.is_differentiable))
        if not self.inputs:
            raise self._not_differentiable("argument", args, "pass floats")
        if not self.output_names:
            raise self._not_differentiable("output", structure.unflatten([]), "return floats")

    def __call__(self, *inputs: Any) -> list[Any]:
        """Return the differentiable outputs for these inputs."""
        return list(self._call(inputs).differentiable)

    def _call(self, inputs: Sequence[Any]) -> FlatStructure:
        """Return the output of the user's function for these inputs."""
        count = len(self._arguments.differentiable)
        args = self._arguments.unflatten(inputs[:count])
        with self._scope(inputs[count:]):
            output = self._fn(*args)
            return self._flatten(output, [("the output", output)])

    def compile(self) -> Callable[..., list[Any]]:
        """Return the same function, compiled by the framework."""
        run = backend.active.compile_function(self.__call__)

        def run_in_scope(*inputs: Any) -> list[Any]:
            with self._scope(inputs[len(self._arguments.differentiable) :]):
                return run(*inputs)

        return run_in_scope

    def _scope(self, values: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return the scope in which the variables have these values."""
        # PyTorch (2.13) does not compile a rule in a scope. `compile` enters the scope outside the program.
        if not self._uses_variables or backend.active.is_reading_code():
            return contextlib.nullcontext()
        return Pinned(self.variables, values)

    def _find_variables(
        self, args: Sequence[Any], variables: Sequence[keras.Variable] | None
    ) -> tuple[list[keras.Variable], bool]:
        """Return the variables that are inputs, and whether the function reads or assigns any variable."""
        with Pinned((), ()), Reads() as scope:
            self._fn(*args)
        read = scope.as_variables()
        if variables is None:
            variables = [variable for variable in read if isinstance(variable, keras.Variable)]
        return list(variables), bool(variables or read or scope.assigned)

    def _flatten(self, structure: Any, named: Sequence[tuple[str, Any]]) -> FlatStructure:
        try:
            return flatten(structure)
        except Refused as refused:
            raise refused.error(self.name, named) from None


def _floats_to_tensors(args: tuple[Any, ...]) -> Any:
    """Convert Python floats in the arguments to tensors, in the dtype of the first floating array."""
    leaves = tree.flatten(args)
    dtypes = [keras.backend.standardize_dtype(leaf.dtype) for leaf in leaves if hasattr(leaf, "dtype")]
    dtype = next((dtype for dtype in dtypes if dtype in EPSILON), keras.config.floatx())
    return tree.pack_sequence_as(args, [_float_to_tensor(leaf, dtype) for leaf in leaves])


def _float_to_tensor(leaf: Any, dtype: str) -> Any:
    if type(leaf) is float:
        return ops.convert_to_tensor(leaf, dtype=dtype)
    return backend.active.as_tensor(leaf) if type(leaf) is complex else leaf


def _paths(layout: Layout, names: Sequence[str], is_single: bool = False) -> list[str]:
    """Return the path of each tensor of a layout, such as `'x'['a']`, for messages.

    `names` are the names of the entries of the layout, or of the layout itself if `is_single`.
    """
    templates = [layout.template] if is_single else layout.template
    return paths_of(zip(names, templates, strict=True))


def _cast(tensor: Any, dtype: str | None) -> Any:
    if dtype in (None, "own"):
        return tensor
    if keras.backend.standardize_dtype(tensor.dtype).startswith("complex"):
        dtype = "complex128" if dtype == "float64" else "complex64"
    return ops.cast(tensor, dtype)
