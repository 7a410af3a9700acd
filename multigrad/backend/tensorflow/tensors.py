"""Tensors: what TensorFlow says of them, and what is done to them on the way through an op."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from multigrad.backend.base import F, Spec
from multigrad.core.type_sets import TypeSet

TENSORS = TypeSet(tf.Tensor)
CONVERTIBLE = TypeSet(keras.Variable, tf.Variable, tf.IndexedSlices, np.ndarray, np.generic)


def after(tensor: Any, other: Any) -> Any:
    if tf.executing_eagerly():
        return tensor
    with tf.control_dependencies([other]):
        return tf.identity(tensor)


def library_code(function: F) -> F:
    """Keep AutoGraph out, as `tf.custom_gradient` does."""
    return tf.autograph.experimental.do_not_convert(function)


def as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


# Not those of fewer bits: TensorFlow's tapes take what is of them for constant, and have no zeros of them.
_DIFFERENTIABLE = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128}


def is_differentiable(tensor: Any) -> bool:
    dtype = tensor.dtype
    return dtype in _DIFFERENTIABLE or dtype.base_dtype in _DIFFERENTIABLE  # that of a reference has a base


def specs_of(tensors: Sequence[Any]) -> list[Spec | None]:
    eager = tf.executing_eagerly()  # where every shape is known
    return [_spec(tensor, eager) if is_differentiable(tensor) else None for tensor in tensors]


def _spec(tensor: Any, known: bool) -> Spec:
    shape = tensor.shape
    return shape, tensor.dtype, None if known or shape.is_fully_defined() else tensor


def sizes(shape: Any) -> tuple[int | None, ...] | None:
    return None if isinstance(shape, tf.TensorShape) and shape.rank is None else tuple(shape)


def conform(gradient: Any, spec: Spec) -> Any:
    shape, dtype, like = spec
    if like is not None or not gradient.shape.is_fully_defined():
        sizes = shape if like is None else tf.shape(like)
        given = tf.shape(gradient)
        fits = tf.debugging.assert_equal(
            tf.broadcast_dynamic_shape(sizes, given), given, "a gradient has the wrong shape"
        )
        with tf.control_dependencies([fits]):
            axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=sizes, s1=given)
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), sizes)
        gradient.set_shape(shape)
    elif gradient.shape != shape:
        extra = gradient.shape.rank - shape.rank
        own = zip(gradient.shape[extra:], shape, strict=True)
        axes = [*range(extra), *[extra + i for i, (got, wanted) in enumerate(own) if got != wanted]]
        gradient = tf.reshape(tf.reduce_sum(gradient, axes), shape)
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def concrete(tensor: Any) -> np.ndarray | None:
    return np.asarray(tensor.numpy()) if hasattr(tensor, "numpy") else None


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    # What is in a graph while `uncompiled` is in force is written down for later, or elsewhere.
    if all([hasattr(tensor, "numpy") for tensor in tensors]):
        callback(*[np.array(tensor.numpy()) for tensor in tensors])


def is_compiling() -> bool:
    return not tf.executing_eagerly()
