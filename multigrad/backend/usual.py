"""What most frameworks answer at the border, each in the one way. What a name is for says `Backend`."""

import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import keras

from multigrad.backend import F


def program(function: Callable[..., Any], *static: Hashable) -> Callable[..., Any]:
    return functools.partial(function, False, *static)


def after(tensor: Any, other: Any) -> Any:
    return tensor


def library_code(function: F) -> F:
    return function


def host_code(function: F) -> F:
    return function


def constant(function: F) -> F:
    return function


def is_reading_code() -> bool:
    return False


def defaults_of(function: types.FunctionType) -> int:
    return len(function.__defaults__ or ())


def as_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


def snapshot(tensor: Any) -> Any:
    return tensor


def assign(variable: keras.Variable, value: Any) -> None:
    variable.assign(value)


def sizes(shape: Any) -> tuple[int | None, ...]:
    return tuple(shape)


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def is_constant(tensor: Any) -> bool:
    return False


def jit(
    function: Callable[..., Any], name: str, static: Mapping[str, int | None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    return function


def wide() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()
