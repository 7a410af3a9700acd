"""The dtypes in which ops compute."""

from typing import Any

import keras
from keras import ops

EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
"""The distance from 1 to the next larger number of each dtype."""

REAL_DTYPES = {"complex64": "float32", "complex128": "float64"}
"""The dtype of the real part of each complex dtype."""


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype, which is the same on every backend."""
    return str(keras.backend.standardize_dtype(tensor.dtype))


def has_gradient(value: Any) -> bool:
    """Return whether a value is a floating tensor."""
    return hasattr(value, "dtype") and bool(keras.backend.is_float_dtype(dtype_of(value)))


def wide_dtype(dtype: str) -> str:
    """Return the dtype in which sums, products and quotients are computed: float32 for half precision."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def cast(value: Any, dtype: str) -> Any:
    """Cast a tensor or number, with the full precision of a number.

    On TensorFlow, `keras.ops.cast` (3.15) first converts a number to float32.
    """
    return ops.cast(value, dtype) if hasattr(value, "dtype") else ops.convert_to_tensor(value, dtype)


def nan_unless(condition: Any, x: Any) -> Any:
    """Return `x`, and NaN where the condition is false.

    No NaN is computed elsewhere, because the debug switches of the frameworks would report it.
    """
    one = ops.cast(condition, x.dtype)
    return x * (one / one)
