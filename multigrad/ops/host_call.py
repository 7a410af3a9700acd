"""`host_call`: Python code on NumPy arrays as an op."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from multigrad import backend
from multigrad.calculus.flat_structure import shapes_may_match
from multigrad.common.errors import describe, message, require_function, shape_text, unusable
from multigrad.core.signature import name_of
from multigrad.core.structure import Layout, Slot, leaves_of, rebuild, split
from multigrad.core.variables import name_of_caller
from multigrad.op import op_custom_gradient


@backend.active.opaque_to_compiler
def host_call(
    function: Callable[..., Any], *args: Any, output: Any, vectorized: bool = False, **kwargs: Any
) -> Any:
    """Call Python code on NumPy arrays: SciPy, a C library, a simulator.

    ```python
    import numpy as np
    from keras import ops
    from multigrad import grad, op_custom_gradient
    from multigrad.ops import host_call

    @op_custom_gradient
    def sine(x):  # np.sin and np.cos stand for code that no framework can differentiate
        slope = host_call(np.cos, x, output=x)
        return host_call(np.sin, x, output=x), lambda upstream: upstream * slope

    print(grad(sine)(0.0))  # 1.0
    ```

    The call works in eager code, in `jax.jit`, `tf.function`, `torch.compile` and `multigrad.jit`, in `fit`,
    and on a KerasTensor, where it is a node of the Functional model. The model can be saved if `function` is
    registered with `keras.saving.register_keras_serializable`. `torch.compile` breaks the graph at the call.

    The call has no derivative. Write a rule around it, as above. Forward mode and second derivatives need a
    rule that calls no host code, or calls it in an op with a rule of its own.

    Arguments:
        function: a function of the arguments, with read-only NumPy arrays instead of tensors. It returns
            arrays with the structure, shapes and dtypes of `output`, or Python numbers for scalars. It should
            depend only on its arguments: compiled code may call it less or more often than written.
        args: tensors, arrays, Variables, other objects, and nested structures of them.
        output: the shapes and dtypes of the result: a tensor, a `keras.KerasTensor(shape, dtype)` or another
            object with a shape and dtype, or a nested structure of them. An argument stands for its own shape
            and dtype. `output` can also be a function of the arguments, with a KerasTensor instead of each
            tensor, that returns such a structure.
        vectorized: whether the function accepts further leading axes on each array and returns them. Under
            `jax.vmap` and `torch.func.vmap` it is then called once for the batch, with every array batched.
            Otherwise, and under `tf.vectorized_map`, it is called for each example.
        kwargs: keyword arguments of the function, and of `output` if that is a function.

    Returns:
        The output of the function, with tensors for arrays.

    Raises:
        TypeError: if a gradient of the call is needed, or if `function` returns another structure or dtype.
        ValueError: if `function` returns another shape, or a dimension of `output` is unknown.
        Exception: the exception of `function`, in eager code. In a compiled function, the framework raises
            its own error, whose text names the function and the exception. TensorFlow's XLA cannot call
            Python, and raises an error that names the node `host_call_cannot_run_with_jit_compile`.
    """
    require_function("host_call", "function", function)
    name = f"host_call of {name_of(function)!r}"
    if not callable(output) or hasattr(output, "shape"):
        leaves = leaves_of((args, kwargs))
        output = rebuild(output, lambda leaf: _spec_of_leaf(name, leaf, leaves))
    return _host_call(function, output, bool(vectorized), args, kwargs)


@keras.saving.register_keras_serializable("multigrad")
class Spec:
    """A shape and a dtype, or the index of an argument that has them."""

    def __init__(self, shape: Sequence[int | None] = (), dtype: str = "", place: int | None = None) -> None:
        self.shape, self.dtype, self.place = list(shape), dtype, place

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"shape": self.shape, "dtype": self.dtype, "place": self.place}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Return the spec of such arguments."""
        return cls(**config)


def _spec_of_leaf(name: str, leaf: Any, leaves: Sequence[Any]) -> Spec:
    for place, argument in enumerate(leaves):
        if leaf is argument and hasattr(leaf, "shape"):
            return Spec(place=place)
    return _spec(name, leaf)


def _spec(name: str, leaf: Any) -> Spec:
    if isinstance(leaf, Spec):
        return leaf
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    sizes = None if shape is None else backend.active.sizes(shape)
    if sizes is None or dtype is None:
        required = "tensors, keras.KerasTensor(shape, dtype), or a function that returns them"
        fix = 'write output=x for an argument x, or output=keras.KerasTensor((3,), "float32")'
        raise unusable(TypeError, name, "output", required=required, got=leaf, fix=fix)
    return Spec(sizes, keras.backend.standardize_dtype(dtype))


@op_custom_gradient(name="multigrad>host_call")
def _host_call(function: Any, output: Any, vectorized: bool, args: Any, kwargs: Any) -> Any:
    caller = name_of_caller()
    name = f"host_call of {name_of(function)!r}" + (f" in {caller}" if caller else "")
    tensors, layout = split((args, kwargs))
    output_layout, specs = _resolve(name, output, args, kwargs)
    host = HostFunction(name, function, layout, output_layout, specs, [len(t.shape) for t in tensors])
    results = backend.active.host_call(
        host, tensors, [(spec.shape, spec.dtype) for spec in specs], vectorized
    )

    def rule(upstream: Any) -> Any:
        raise TypeError(
            message(
                name,
                "the call has no derivative of its own",
                required="a rule around the call. If the rule calls host code, it supports neither forward "
                "mode nor second derivatives",
                got="a derivative with respect to its arguments",
                fix="call it in a function that op_custom_gradient decorates and that returns a rule, or on "
                "keras.ops.stop_gradient(x)",
            )
        )

    return output_layout.join(results), rule


def _resolve(name: str, output: Any, args: Any, kwargs: Any) -> tuple[Layout, list[Spec]]:
    """Return the layout of the output, and the shape and dtype of each array in it."""
    tensors = backend.active.TENSORS
    if callable(output) and not isinstance(output, Spec):
        described = rebuild((args, kwargs), lambda leaf: _spec_of(leaf) if tensors[type(leaf)] else leaf)
        expected = output(*described[0], **described[1])
    else:
        leaves = leaves_of((args, kwargs))
        expected = rebuild(output, lambda leaf: leaf if leaf.place is None else leaves[leaf.place])
    specs: list[Spec] = []

    def take(leaf: Any) -> Slot:
        specs.append(_spec(name, leaf))
        return Slot(len(specs) - 1)

    output_layout = Layout(rebuild(expected, take))
    for spec in specs:
        if None in spec.shape and not _has_unknown_sizes((args, kwargs)):
            raise ValueError(
                message(
                    name,
                    "a dimension of the output is unknown",
                    argument="'output'",
                    required="a size for each dimension",
                    got=f"the shape {shape_text(tuple(spec.shape))}",
                    fix="pass a function of the arguments' specs, as in "
                    "output=lambda x: keras.KerasTensor((x.shape[0], 3), x.dtype)",
                )
            )
    return output_layout, specs


def _spec_of(tensor: Any) -> keras.KerasTensor:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.KerasTensor(backend.active.sizes(tensor.shape), dtype)


def _has_unknown_sizes(structure: Any) -> bool:
    """Return whether a graph does not know a size, or has a symbol for it, which Keras writes as None."""
    tensors = [leaf for leaf in leaves_of(structure) if backend.active.TENSORS[type(leaf)]]
    return any(None in _spec_of(tensor).shape for tensor in tensors)


@dataclass
class HostFunction:
    """A function of flat NumPy arrays that checks its outputs.

    Arguments:
        name: the name in messages.
        function: the user's function.
        arguments: the layout of its arguments, `(args, kwargs)`.
        output: the layout of its output.
        specs: the shape and dtype of each array in the output.
        ranks: the number of axes of each array among the arguments, without batch axes.
    """

    name: str
    function: Callable[..., Any]
    arguments: Layout
    output: Layout
    specs: Sequence[Spec]
    ranks: Sequence[int]

    def __call__(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Call the function, and let its exceptions pass."""
        try:
            result = self._call(arrays)
        except Exception as error:
            error.add_note(f"raised in {self.name}")
            raise
        return self._check(result, arrays)

    def in_program(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """Call the function from a compiled program, which reports only the text of an exception."""
        try:
            result = self._call(arrays)
        except Exception as error:
            text = f"{self.name}: the function raised {type(error).__name__}: {error}"
            raise RuntimeError(text).with_traceback(error.__traceback__) from error
        return self._check(result, arrays)

    def _call(self, arrays: Sequence[Any]) -> Any:
        args, kwargs = self.arguments.join([_read_only(array) for array in arrays])
        return self.function(*args, **kwargs)

    def _check(self, result: Any, arrays: Sequence[Any]) -> list[np.ndarray]:
        batch = arrays[0].shape[: arrays[0].ndim - self.ranks[0]] if arrays else ()
        template = self.output.template
        nested = tree.is_nested(template)
        try:
            if nested or tree.is_nested(result):
                tree.assert_same_structure(template, result)
        except (TypeError, ValueError) as error:
            required = str(rebuild(template, lambda slot: _text(self.specs[slot], batch)))
            fix = "return the structure of `output`, with an array for each tensor"
            raise self._differs(TypeError, "structure", "", required, describe(result), fix) from error
        paths = [path for path, _ in tree.flatten_with_path(template)] if nested else [()]
        leaves = tree.flatten(result) if nested else [result]
        return [
            self._check_leaf("".join([f"[{key!r}]" for key in path]), leaf, spec, batch)
            for path, leaf, spec in zip(paths, leaves, self.specs, strict=True)
        ]

    def _check_leaf(self, path: str, leaf: Any, spec: Spec, batch: Sequence[int]) -> np.ndarray:
        dtype = np.dtype(spec.dtype)
        is_number = isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)
        if is_number and np.can_cast(np.min_scalar_type(leaf), dtype, "same_kind"):
            leaf = np.asarray(leaf, dtype)
        shape = (*batch, *spec.shape)
        if not isinstance(leaf, (np.ndarray, np.generic)) or leaf.dtype != dtype:
            required = f"an array of dtype {spec.dtype}"
            fix = f"convert it, as in `np.asarray(y, {spec.dtype!r})`"
            raise self._differs(TypeError, "dtype", path, required, describe(leaf), fix)
        if not shapes_may_match(leaf.shape, shape):
            fix = "return an array of this shape" + (", omit vectorized=True" if batch else "")
            raise self._differs(ValueError, "shape", path, shape_text(shape), shape_text(leaf.shape), fix)
        return np.array(leaf, order="C")  # a copy, because the function may keep and change the array

    def _differs(
        self, kind: type[Exception], attribute: str, path: str, required: str, got: str, fix: str
    ) -> Exception:
        """Return the error for a result, or its part at this path, that is not as `output` describes."""
        return kind(
            message(
                self.name,
                f"the function returns another {attribute} than `output`",
                argument=f"output{path}",
                required=required,
                got=got,
                fix=f"{fix}, or change `output`",
            )
        )


def _read_only(array: Any) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def _text(spec: Spec, batch: Sequence[int]) -> str:
    return f"{spec.dtype} {shape_text((*batch, *spec.shape))}"
