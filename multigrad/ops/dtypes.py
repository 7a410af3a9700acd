"""In which dtype an op computes."""

from typing import Any

import keras
from keras import ops


def dtype_of(tensor: Any) -> str:
    """The name of a tensor's dtype, the same for every backend."""
    return str(keras.backend.standardize_dtype(tensor.dtype))


def has_gradient(value: Any) -> bool:
    """Whether it is a floating tensor, and no number."""
    return hasattr(value, "dtype") and bool(keras.backend.is_float_dtype(dtype_of(value)))


def exact(dtype: str) -> str:
    """The dtype in which sums, products and quotients of such numbers keep their digits."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def cast(value: Any, dtype: str) -> Any:
    """A tensor or number in another dtype, with all digits of a number.

    `keras.ops.cast` (3.15) makes a tensor of float32 of a number first, on TensorFlow.
    """
    return ops.cast(value, dtype) if hasattr(value, "dtype") else ops.convert_to_tensor(value, dtype)
