"""The arguments of an op in a file: plain data, and back.

JSON knows no tuple and no tensor, and Keras writes a member of an enum as a number. What comes back here
is what an op was given, or it is not written at all. Nothing that a file says is imported or run: the
functions and objects in it are those that Keras finds, registered or its own.
"""

import base64
import json
import types
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad.core.errors import describe
from multigrad.core.structure import Slot

_PLAIN = (type(None), bool, int, float, str)
_FOUND_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)
_STATEFUL = (keras.Variable, keras.Layer, keras.Metric, keras.Optimizer, keras.random.SeedGenerator)


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
    numpys = kind is np.ndarray or isinstance(value, np.generic)
    if numpys or ops.is_tensor(value):
        return _encode_array(np.asarray(value) if numpys else value)
    return {"keras": _encode_object(value)}


def _encode_array(value: Any) -> Any:
    """In bytes, where they are read as the same: those of a text or of a framework's variable are not."""
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
    """In Keras's own form, where Keras reads it back as the same."""
    if getattr(value, "__name__", None) == "<lambda>" or isinstance(value, _STATEFUL):
        raise Unsaved(value)  # the code is not for a file; the state would be lost
    try:
        config = keras.saving.serialize_keras_object(value)
        restored = keras.saving.deserialize_keras_object(json.loads(json.dumps(config)))
    except Exception as error:  # of Keras, or of a class that is registered
        raise Unsaved(value) from error
    found = restored is value or not isinstance(value, _FOUND_BY_NAME)
    # What Keras writes as data and not as an object is of another type when it comes back.
    if not isinstance(config, dict) or type(restored) is not type(value) or not found:
        raise Unsaved(value)
    if not _tells_all(value, restored, set()):
        raise Unsaved(value)
    return config


def _tells_all(value: Any, restored: Any, seen: set[int]) -> bool:
    """Whether nothing in `value` has a state, and its numbers and texts are those of `restored`."""
    if type(value) in _PLAIN:
        return repr(value) == repr(restored)
    if isinstance(value, _STATEFUL):
        return False
    if isinstance(value, (*_FOUND_BY_NAME, types.ModuleType)) or id(value) in seen:
        return True
    seen.add(id(value))
    parts, others = _parts(value), _parts(restored)
    return all([_tells_all(part, others.get(place), seen) for place, part in parts.items()])


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (set, frozenset)):
        return {part: part for part in value}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    slots = [
        name
        for kind in type(value).__mro__
        if "__slots__" in vars(kind)
        for name, slot in vars(kind).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def decode(data: Any) -> Any:
    """The template that `encode` was given.

    Raises:
        ValueError: for data that `encode` does not write, or that cannot be read here.
    """
    try:
        return _decode(data)
    except Exception as error:  # of NumPy, of Keras, of a class that is registered
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
        case [("input", int(place))] if type(place) is int and place >= 0:
            return Slot(place)
        case [("complex", [float(real), float(imag)])]:
            return complex(real, imag)
        case [("array", [str(dtype), [*shape], str(content)])]:
            return _decode_array(dtype, shape, content)
        case [("tensor", [str(dtype), str(stored), [*shape], str(content)])]:
            return ops.convert_to_tensor(_decode_array(stored, shape, content), dtype)
        case [("keras", {"class_name": str(), "config": _} as config)]:
            return _decode_object(config)
    raise ValueError(f"{describe(data)} is nothing that multigrad writes")


def _decode_items(items: list[Any]) -> dict[Any, Any]:
    decoded = {_decode(key): _decode(part) for key, part in items}
    if any([type(item) is not list for item in items]) or len(decoded) != len(items):
        raise ValueError(f"{describe(items)} is nothing that multigrad writes of a dict")
    return decoded


def _decode_array(dtype: str, shape: list[int], content: str) -> np.ndarray:
    kind = np.dtype(keras.backend.standardize_dtype(dtype))
    array = np.frombuffer(base64.b64decode(content, validate=True), kind).reshape(shape).copy()
    if [array.dtype.name, list(array.shape)] != [dtype, shape]:
        raise ValueError(f"{dtype} and {shape} are no dtype and shape that multigrad writes")
    return array


def _decode_object(config: dict[str, Any]) -> Any:
    value = keras.saving.deserialize_keras_object(config)
    if isinstance(value, (np.ndarray, keras.KerasTensor, *_STATEFUL)) or ops.is_tensor(value):
        raise ValueError(f"{describe(value)} is nothing that multigrad writes as an object")
    return value
