"""Every backend without an implementation of its own, such as NumPy and OpenVINO.

Ops run without gradients, by `keras.ops`, and computing a gradient raises an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from multigrad.backend.base import Call, HostFunction, Spec, TensorSpec, dependence_error
from multigrad.backend.defaults import *
from multigrad.common.frameworks import DIFFERENTIATING
from multigrad.common.type_sets import ForeignArrays, TypeSet

# NumPy arrays, or a class of Keras without a public name.
TENSORS = TypeSet(type(keras.ops.convert_to_tensor(0.0)))
FOREIGN = ForeignArrays(type(keras.ops.convert_to_tensor(0.0)), np.ndarray)


def apply(call: Call, tensors: Sequence[Any]) -> Sequence[Any]:
    return call.run(tensors).outputs


def value_and_grad(
    function: Callable[..., Any], tensors: Sequence[Any], variables: Sequence[keras.Variable]
) -> NoReturn:
    raise _no_gradients()


def vjp(function: Callable[..., Any], tensors: Sequence[Any], variables: Sequence[Any] = ()) -> NoReturn:
    raise _no_gradients()


vjp_at_once = vjp
jvp = transposed(vjp)


def vmap(
    function: Callable[..., tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    rows = [function(*[x[i] for x in tensors]) for i in range(tensors[0].shape[0])]
    stacked, shared = [list(zip(*results, strict=True)) for results in zip(*rows, strict=True)]
    once = [keras.ops.convert_to_numpy(results[0]) for results in shared]
    for result, others in zip(once, shared, strict=True):
        if not all(np.array_equal(result, keras.ops.convert_to_numpy(x), equal_nan=True) for x in others):
            raise ValueError(dependence_error("vmap", "different values"))
    return [keras.ops.stack(results) for results in stacked], [results[0] for results in shared]


map_rows = mapped(vmap)


def is_differentiable(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype).startswith(("float", "bfloat", "complex"))


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    return [None] * len(tensors)


def conform(gradient: Any, spec: Spec) -> NoReturn:
    raise _no_gradients()


def concrete(tensor: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def watch(callback: Callable[..., None], tensor: Any) -> Any:
    observe(callback, [tensor])
    return tensor


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    callback(*[np.array(keras.ops.convert_to_numpy(tensor)) for tensor in tensors])


def may_record(tensors: Sequence[Any] | None = None) -> bool:
    return False


def compile_function(function: Callable[..., Any]) -> NoReturn:
    raise _no_gradients()


def is_compiling() -> bool:
    return False


def host_call(
    function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
) -> Sequence[Any]:
    arrays = function([np.asarray(keras.ops.convert_to_numpy(tensor)) for tensor in tensors])
    return [keras.ops.convert_to_tensor(array) for array in arrays]


def _no_gradients() -> NotImplementedError:
    return NotImplementedError(
        f"Keras's {keras.backend.backend()} backend computes no gradients.\n"
        f"The backends that do are {', '.join(DIFFERENTIATING)}. Choose one with the environment variable\n"
        "KERAS_BACKEND before Keras is imported.\n"
        "  see: python -m multigrad explain limits#numpy-and-openvino"
    )
