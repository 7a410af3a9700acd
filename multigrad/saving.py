"""The arguments of an op in a file: plain data, and back.

JSON knows no tuple and no tensor, and Keras writes a member of an enum as a number. What comes back here
is what an op was given, or it is not written at all. Nothing that a file says is imported or run: the
functions and objects in it are those that Keras finds, registered or its own.
"""

import base64
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad.leaves import Slot

_PLAIN = (type(None), bool, int, float, str)
_FOUND_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)


class Unsaved(Exception):
    """A value that cannot be written so that it comes back the same."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def encode(value: Any) -> Any:
    """A template of arguments (see `Layout`) as plain data.

    ```python
    assert decode(encode((1, [0.5, "same"]))) == (1, [0.5, "same"])
    ```

    Raises:
        Unsaved: for a value that has no such form.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [encode(part) for part in value]
    if kind is tuple:
        return {"tuple": [encode(part) for part in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    if kind is Slot:
        return {"input": int(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    arrays = isinstance(value, (np.ndarray, np.generic))
    if isinstance(value, keras.Variable) or (arrays and value.dtype.kind in "OSUMm"):
        raise Unsaved(value)
    if arrays:
        return {"array": _encode_array(value)}
    if ops.is_tensor(value):
        array = ops.convert_to_numpy(value)
        return {"tensor": [keras.backend.standardize_dtype(value.dtype), *_encode_array(array)]}
    return {"keras": _encode_object(value)}


def _encode_array(array: Any) -> list[Any]:
    return [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _encode_object(value: Any) -> Any:
    """In Keras's own form, where Keras reads it back as the same."""
    if isinstance(value, keras.Layer) or getattr(value, "__name__", None) == "<lambda>":
        raise Unsaved(value)  # the weights would be lost; the code is not for a file
    try:
        config = keras.saving.serialize_keras_object(value)
        restored = keras.saving.deserialize_keras_object(config)
    except (TypeError, ValueError) as error:
        raise Unsaved(value) from error
    found = restored is value or not isinstance(value, _FOUND_BY_NAME)
    # What Keras writes as data and not as an object is of another type when it comes back.
    if not isinstance(config, dict) or type(restored) is not type(value) or not found:
        raise Unsaved(value)
    return config


def decode(data: Any) -> Any:
    """The template that `encode` was given.

    Raises:
        ValueError: for data that `encode` does not write.
    """
    if type(data) in _PLAIN:
        return data
    if type(data) is list:
        return [decode(part) for part in data]
    if type(data) is dict and len(data) == 1:
        ((kind, content),) = data.items()
        if kind in _DECODERS:
            return _DECODERS[kind](content)
    raise ValueError(f"multigrad: the arguments of an op in a saved model cannot be read: {data!r}")


def _decode_array(content: Any) -> np.ndarray:
    dtype, shape, data = content
    dtype = np.dtype(keras.backend.standardize_dtype(dtype))
    return np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda parts: tuple([decode(part) for part in parts]),
    "dict": lambda items: {decode(key): decode(part) for key, part in items},
    "input": Slot,
    "complex": lambda parts: complex(*parts),
    "array": _decode_array,
    "tensor": lambda parts: ops.convert_to_tensor(_decode_array(parts[1:]), parts[0]),
    "keras": keras.saving.deserialize_keras_object,
}
