"""Encode the arguments of an op as JSON data, and decode them.

JSON has no tuples and tensors, and Keras saves the member of an enum as a number. An argument is encoded only
if decoding returns an equal object. Decoding imports and runs nothing that a file names, except objects of
Keras and objects that are registered with it.
"""

import base64
import json
import types
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad.common.errors import describe
from multigrad.core.structure import Slot

_PLAIN = (type(None), bool, int, float, str)
_SAVED_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_STATEFUL = (keras.Variable, keras.Layer, keras.Metric, keras.Optimizer, keras.random.SeedGenerator)


class Unsaved(Exception):
    """Raised for a value that cannot be encoded."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def encode(value: Any) -> Any:
    """Return a template of arguments (see `Layout`) as plain data.

    ```python
    assert decode(encode((1, [0.5, "same"]))) == (1, [0.5, "same"])
    ```

    Raises:
        Unsaved: if decoding would not return an equal value.
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
    is_numpy = kind is np.ndarray or isinstance(value, np.generic)
    if is_numpy or ops.is_tensor(value):
        return _encode_array(np.asarray(value) if is_numpy else value)
    return {"keras": _encode_object(value)}


def _encode_array(value: Any) -> Any:
    """Return the bytes of an array or tensor.

    Raises:
        Unsaved: for text and for a variable of the framework.
    """
    try:
        array = ops.convert_to_numpy(value)
        content = [array.dtype.name, list(array.shape), base64.b64encode(array.tobytes()).decode()]
        if type(value) is np.ndarray:
            data = {"array": content}
        else:
            data = {"tensor": [keras.backend.standardize_dtype(value.dtype), *content]}
        restored = decode(data)
    except (TypeError, ValueError) as error:
        raise Unsaved(value) from error
    if type(restored) is not type(value) or restored.dtype != value.dtype:
        raise Unsaved(value)
    return data


def _encode_object(value: Any) -> Any:
    """Return the config of an object, if Keras restores the object from it."""
    if getattr(value, "__name__", None) == "<lambda>" or isinstance(value, _STATEFUL):
        raise Unsaved(value)  # a file must not contain code, and cannot keep state
    try:
        config = keras.saving.serialize_keras_object(value)
        restored = keras.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    except Exception as error:  # raised by Keras or by a registered class
        raise Unsaved(value) from error
    is_restored = restored is value or not isinstance(value, _SAVED_BY_NAME)
    # An object that Keras saves as plain data is restored with another type.
    if not isinstance(config, dict) or type(restored) is not type(value) or not is_restored:
        raise Unsaved(value)
    if not _is_equal(value, restored, set()):
        raise Unsaved(value)
    return config


def _is_equal(value: Any, restored: Any, seen: set[int]) -> bool:
    """Return whether `value` has no state, and `restored` holds equal numbers and strings."""
    if type(value) in _PLAIN:
        return repr(value) == repr(restored)
    if isinstance(value, _STATEFUL):
        return False
    if isinstance(value, (*_SAVED_BY_NAME, types.ModuleType)) or id(value) in seen:
        return True
    seen.add(id(value))
    parts, restored_parts = _parts(value), _parts(restored)
    return all([_is_equal(part, restored_parts.get(key), seen) for key, part in parts.items()])


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (set, frozenset)):
        return {part: part for part in value}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    state: Any = object.__getstate__(value)  # of attributes, and of slots if there are any
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def decode(data: Any) -> Any:
    """Return the template from the data that `encode` returned.

    Raises:
        ValueError: if `encode` cannot have returned the data, or an object in it cannot be restored.
    """
    try:
        return _decode(data)
    except Exception as error:  # raised by NumPy, Keras or a registered class
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _decode(data: Any) -> Any:
    if type(data) in _PLAIN:
        return data
    if type(data) is list:
        return [_decode(part) for part in data]
    match list(data.items()) if type(data) is dict else data:
        case [("tuple", [*parts])]:
            return tuple([_decode(part) for part in parts])
        case [("dict", [*items])]:
            return _decode_items(items)
        case [("input", int(index))] if type(index) is int and index >= 0:
            return Slot(index)
        case [("complex", [float(real), float(imag)])]:
            return complex(real, imag)
        case [("array", [str(dtype), [*shape], str(content)])]:
            return _decode_array(dtype, shape, content)
        case [("tensor", [str(dtype), str(stored), [*shape], str(content)])]:
            return ops.convert_to_tensor(_decode_array(stored, shape, content), dtype)
        case [("keras", {"class_name": str(), "config": _} as config)]:
            return _decode_object(config)
    raise ValueError(f"multigrad does not write {describe(data)}")


def _decode_items(items: list[Any]) -> dict[Any, Any]:
    decoded = {_decode(key): _decode(part) for key, part in items}
    if any([type(item) is not list for item in items]) or len(decoded) != len(items):
        raise ValueError(f"multigrad does not write {describe(items)} for a dict")
    return decoded


def _decode_array(dtype: str, shape: list[int], content: str) -> np.ndarray:
    kind = np.dtype(keras.backend.standardize_dtype(dtype))
    array = np.frombuffer(base64.b64decode(content, validate=True), kind).reshape(shape).copy()
    if [array.dtype.name, list(array.shape)] != [dtype, shape]:
        raise ValueError(f"multigrad does not write the dtype {dtype} with the shape {shape}")
    return array


def _decode_object(config: dict[str, Any]) -> Any:
    value = keras.saving.deserialize_keras_object(config)
    if isinstance(value, (np.ndarray, keras.KerasTensor, *_STATEFUL)) or ops.is_tensor(value):
        raise ValueError(f"multigrad does not write {describe(value)} as an object")
    return value
