"""Properties and conversions of TensorFlow's tensors."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from multigrad.backend.base import F, Spec
from multigrad.common.type_sets import ForeignArrays, TypeSet

TENSORS = TypeSet(tf.Tensor)
CONVERTIBLE = TypeSet(keras.Variable, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)
FOREIGN = ForeignArrays(tf.Tensor, tf.Variable, np.ndarray)


def library_code(function: F) -> F:
    """Exclude the function from AutoGraph, as `tf.custom_gradient` does."""
    return tf.autograph.experimental.do_not_convert(function)


def as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


# Without float8 dtypes: TensorFlow's tapes treat them as constants, and have no zeros for them.
_DIFFERENTIABLE = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128}


def is_differentiable(tensor: Any) -> bool:
    dtype = tensor.dtype
    return (
        dtype in _DIFFERENTIABLE or dtype.base_dtype in _DIFFERENTIABLE
    )  # a reference dtype has a base dtype


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    eager = tf.executing_eagerly()  # all shapes are static
    return [_spec(tensor, eager) if is_differentiable(tensor) else None for tensor in tensors]


def _spec(tensor: Any, static: bool) -> Spec:
    shape = tensor.shape
    return shape, tensor.dtype, None if static or shape.is_fully_defined() else tensor


def sizes(shape: Any) -> tuple[int | None, ...] | None:
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else tuple(shape)


def conform(gradient: Any, spec: Spec) -> Any:
    shape, dtype, like = spec
    if like is not None or not gradient.shape.is_fully_defined():
        sizes = shape if like is None else tf.shape(like)
        gradient_shape = tf.shape(gradient)
        fits = tf.debugging.assert_equal(
            tf.broadcast_dynamic_shape(sizes, gradient_shape),
            gradient_shape,
            "a gradient has the wrong shape",
        )
        with tf.control_dependencies([fits]):
            axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=sizes, s1=gradient_shape)
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), sizes)
        gradient.set_shape(shape)
    elif gradient.shape != shape:
        extra = gradient.shape.rank - shape.rank
        pairs = zip(gradient.shape[extra:], shape, strict=True)
        axes = [*range(extra), *[extra + i for i, (got, required) in enumerate(pairs) if got != required]]
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), shape)
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def concrete(tensor: Any) -> np.ndarray | None:
    return np.asarray(tensor.numpy()) if hasattr(tensor, "numpy") else None


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    # Symbolic tensors are skipped: in `without_compilation`, a graph is built only to run elsewhere.
    if all([hasattr(tensor, "numpy") for tensor in tensors]):
        callback(*[np.array(tensor.numpy()) for tensor in tensors])


def watch(callback: Callable[..., None], tensor: Any) -> Any:
    if tf.executing_eagerly():
        observe(callback, [tensor])
        return tensor

    def call_back(array: np.ndarray) -> bool:
        callback(np.array(array))
        return True  # without a result, no map vectorizes the operation

    # XLA cannot call Python, and names the operation in its error.
    name = "callback_cannot_run_with_jit_compile"
    call = tf.numpy_function(call_back, [tensor], tf.bool, name=name)
    with tf.control_dependencies([call]):
        return tf.identity(tensor)


def is_compiling() -> bool:
    return not tf.executing_eagerly()


def trace_level() -> Hashable:
    return id(tf.compat.v1.get_default_graph())  # alive while the caller compares
