"""The members of a backend that most frameworks share. A backend imports all of them, and replaces some."""

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from multigrad.backend.base import F, Operation, S
from multigrad.common.process_wide import FORWARD_MODE
from multigrad.common.type_sets import TypeSet

CONVERTIBLE: TypeSet = TypeSet(keras.Variable, np.ndarray, np.generic)
"""Other types that are converted to a dense tensor: arrays and variables."""

TRACES_ONCE: bool = False
"""Whether `jit` does not notice that a variable is frozen after the trace."""

HAS_DEVICES: bool = False
"""Whether a gradient must be on the device of its tensor. TensorFlow and JAX take it from any device."""

FORWARD_OVER_REVERSE: bool = False
"""Whether a Hessian takes less time as `jvp` of a gradient than as `vjp` of a gradient."""

STAND_INS: TypeSet = TypeSet()
"""Types that stand for a tensor while a program is recorded. They cannot have a rule."""


def transposed(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `jvp` of a backend that has no faster one: the transpose of its `vjp`.

    It differentiates an op by the transpose of its rule.
    """

    def jvp(
        function: Callable[..., tuple[Sequence[Any], Any]],
        tensors: Sequence[Any],
        tangents: Sequence[Any],
        variables: Sequence[keras.Variable] = (),
    ) -> tuple[tuple[Sequence[Any], Any], Sequence[Any]]:
        FORWARD_MODE.append(None)  # a program may run rules
        try:
            result, pullback = vjp(function, tensors, variables)
            # The pullback is linear, so its transpose is the same at any upstream gradient.
            ones = [keras.ops.ones_like(output) for output in result[0]]
            _, transpose = vjp(lambda *upstream: (pullback(upstream), None), ones)
            return result, transpose(tangents)
        finally:
            FORWARD_MODE.pop()

    return jvp


def mapped(vmap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `map_rows` of a backend that maps them by its `vmap`."""

    def map_rows(row: Callable[[Any], Sequence[Any]], upstreams: Any) -> Sequence[Any]:
        rows: Sequence[Any] = vmap(lambda upstream: (row(upstream), ()), [upstreams])[0]
        return rows

    return map_rows


def depends_on_element(result: Any, elements: Sequence[Any]) -> bool:
    """Return whether a result of a function in `vmap` depends on its arguments, the elements.

    The answer is False where only `vmap` can tell.
    """
    return False


def trace_level() -> Hashable:
    """Return a value that differs in a loop, branch, map or derivative, which no tensor may leave."""
    return None


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function, compiled. Keras Variables that it reads or assigns become inputs or outputs.

    Arguments:
        function: a function of nested structures, which every framework's compiler flattens itself.
        name: the name of the function in messages.
        static: the names and positions of static parameters; None for a keyword-only one.
        options: keyword arguments of the framework's compiler.
    """
    return function


def operations(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> set[Operation] | None:
    """Return the dtypes of the operations that a function of tensors runs, also in nested programs.

    Operations that keep the dtype of their operands may be missing. To find the operations, the function
    runs or is traced once more. The answer is None if the framework cannot trace the function.
    """
    return None


def is_constant(tensor: Any) -> bool:
    """Return whether this value of a variable is a constant of the program that is being compiled."""
    return False


def opaque_to_compiler(function: F) -> F:
    """Mark a function that no compiler of Python code can trace.

    It calls the host, or has a loop whose length depends on values.
    """
    return function


def extend_reads(reads: type[Any]) -> type[Any]:
    """Return the class of the scope around a function: `reads`, or a subclass of it.

    `reads` is `multigrad.core.variables.Reads`.
    """
    return reads


def extend_pinned(pinned: S) -> S:
    """Return the class of the scope that gives variables other values: `pinned`, or a subclass of it.

    `pinned` is `multigrad.core.variables.Pinned`.
    """
    return pinned


def library_code(function: F) -> F:
    """Mark a function as library code, for a framework that rewrites or compiles Python code."""
    return function


def update_wrapper(wrapper: F, wrapped: Callable[..., Any]) -> F:
    """Do what `functools.update_wrapper` does, for a framework that rewrites or replaces wrappers."""
    functools.update_wrapper(wrapper, wrapped)
    return wrapper


def constant(function: F) -> F:
    """Mark a function whose result depends only on its arguments and holds no tensor."""
    return function


is_reading_code: Callable[[], bool] = bool
"""Return whether a compiler of Python code, such as Dynamo, traces this code. `bool()` is False."""


def defaults_of(function: types.FunctionType) -> int:
    """Return the number of positional parameters of a rule that have defaults."""
    return len(function.__defaults__ or ())


def while_loop(
    condition: Callable[..., Any], body: Callable[..., Sequence[Any]], carry: Sequence[Any], limit: int
) -> Sequence[Any]:
    """Repeat `body` on traced tensors without gradients, at most `limit` times, while `condition` holds.

    In a `vmap`, an element stays as it is once its condition is false.
    """
    return tuple(keras.ops.while_loop(condition, body, tuple(carry), maximum_iterations=limit))


def solve(matrices: Any, right: Any) -> Any:
    """Return the solutions of linear equations, without gradients: NaN or Inf for a singular matrix."""
    return keras.ops.solve(matrices, right)


def as_tensor(value: Any) -> Any:
    """Return a dense tensor with the value of an array, a number or a variable."""
    return keras.ops.convert_to_tensor(value)


def reshape(tensor: Any, *likes: Any) -> Any:
    """Return the tensor in the shape that the shapes of `likes` make one after another."""
    return tensor.reshape([size for like in likes for size in like.shape])


def snapshot(tensor: Any) -> Any:
    """Return a tensor with the current value of `tensor`, which may be modified in place later."""
    return tensor


def assign(variable: keras.Variable, value: Any) -> None:
    """Assign a value that a derivative, a map or a program returned to a variable."""
    variable.assign(value)


def sizes(shape: Any) -> tuple[int | None, ...] | None:
    """Return a shape as a tuple, with None for an unknown dimension, or None for an unknown rank."""
    return tuple(shape)


def depends_on_others(function: Callable[[Any], Any], tensor: Any) -> bool:
    """Return whether `function(tensor)` has a history that does not come from the tensor.

    The answer is False where the framework cannot tell.
    """
    return False


def wide() -> AbstractContextManager[Any]:
    """Return a context with float64 and complex128, for this thread."""
    return contextlib.nullcontext()


def without_compilation() -> AbstractContextManager[Any]:
    """Return a context in which compiled functions run eagerly, on concrete tensors."""
    return contextlib.nullcontext()
