"""Register ops by name, so that saved models find them.

An op with a name of the form `package>name` is registered with Keras. A name belongs to one op, so that a
saved model is never loaded with a different one.
"""

import importlib
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from multigrad.common.errors import describe, message, unusable
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.core.signature import name_of

Op = Callable[..., Any]

_LOCK = threading.RLock()  # reentrant, because the module of an op can define another one


class _Definition(NamedTuple):
    """The function of a registered op, and its option."""

    f: Op
    higher_order: bool


_DEFINITIONS: dict[Op, _Definition] = {}  # Keras keeps registered ops for the life of the process


def register(name: str, f: Op, higher_order: bool, define: Callable[[], Op]) -> Op:
    """Return the op of `f` that is registered as `name`.

    If the registered op has the same definition, it is returned. If its function is an earlier version of
    `f`, as after reloading a module, the result of `define` replaces it. Two versions are functions at the
    top level of one module, with one name.

    Raises:
        ValueError: if the name is invalid or registered for another object.
    """
    package, short_name = _package_and_name(name)
    definition = _Definition(f, higher_order)
    with _LOCK:
        registered = keras.saving.get_custom_objects().get(name)
        if registered is not None:
            earlier = _definition_of(registered)
            if earlier is not None and _is_same(earlier, definition):
                return registered
            if earlier is None or not _is_version(earlier.f, f):
                raise _name_taken(name, registered, f)
        op = define()
        if getattr(f, "__name__", "<lambda>") == "<lambda>":
            op.__name__ = short_name  # Keras saves the code of a function with the name of a lambda
        _DEFINITIONS[op] = definition
        return keras.saving.register_keras_serializable(package, short_name)(op)


def refuse_config(op: Op, name: str) -> Op:
    """Return the op, and let it raise when Keras saves it without a registered name.

    Keras (3.15) saves a function such as an `activation=` by its name alone, and loads `tanh` as its own.
    Before, it calls `get_build_config` of the function if there is one. Here it raises.
    """
    if getattr(op, "__name__", "") == "<lambda>":
        op.__name__ = identifier(name)  # Keras would save the code of the lambda, with the rule in it
    op.get_build_config = _ConfigRefusal(weakref.ref(op), name)  # type: ignore[attr-defined]
    return op


class _ConfigRefusal(HoldsNoTensor):
    """Raises an error when Keras saves an op, unless the user registered the op with Keras."""

    __slots__ = ("_name", "_op")

    def __init__(self, op: "weakref.ref[Op]", name: str) -> None:
        self._op, self._name = op, name

    def __call__(self) -> None:
        name = keras.saving.get_registered_name(self._op())
        if keras.saving.get_registered_object(name) is not self._op():
            raise without_name(self._name)


def without_name(name: str) -> NotImplementedError:
    """Return the error for saving an op that has no registered name."""
    return NotImplementedError(
        message(
            name,
            "an op without a registered name cannot be saved in a model, or copied from its config",
            required="a name of the form 'package>name'",
            got=f"{name!r}, which is only used in messages",
            fix=f"define it with @op_custom_gradient(name='my_package>{identifier(name)}')",
            see="in-a-model#ops-without-a-name",
        )
    )


def identifier(name: str) -> str:
    """Return the name of an op, without its package, as an identifier."""
    return re.sub(r"\W+", "_", name.rpartition(">")[2]).strip("_") or "op"


_DEFINED_IN = {"multigrad": "multigrad.ops"}
"""The module that registers the ops of a package."""


def find(name: Any) -> Op:
    """Return the op that is registered as `name`.

    Raises:
        TypeError: if there is none. Keras raises the same type for an object that is not registered.
    """
    if isinstance(name, str) and (module := _DEFINED_IN.get(name.partition(">")[0])):
        importlib.import_module(module)
    registered = keras.saving.get_registered_object(name) if isinstance(name, str) else None
    if registered is not None and _definition_of(registered) is not None:
        return registered
    raise TypeError(
        message(
            name if isinstance(name, str) else "multigrad",
            "a saved model uses an op that is not defined",
            required="an op of this name, defined before the model is loaded",
            got=describe(name) if registered is None else f"{describe(registered)}, which is not an op",
            fix=f"define it with @op_custom_gradient(name={name!r}), or import its module",
        )
    )


def modules_to_load(name: str, op: Op) -> str:
    """Return what a program must import or define before it loads a model with this op, as a text."""
    module = getattr(op, "__module__", None)
    if name.startswith("multigrad>"):
        return "import multigrad"
    if module in (None, "__main__"):
        return f"import multigrad, and define the op with @op_custom_gradient(name={name!r})"
    return f"import multigrad, and import {module}, which defines the op {name!r}"


def _definition_of(registered: Any) -> _Definition | None:
    return _DEFINITIONS.get(registered) if isinstance(registered, types.FunctionType) else None


def _package_and_name(name: str) -> list[str]:
    parts = name.split(">")
    if len(parts) == 2 and all(part and part == part.strip() for part in parts) and "/" not in name:
        return parts
    required = "'package>name', with no other '>', no '/' and no space at the ends"
    fix = "write name='my_package>my_op'; a name without '>' is only used in messages"
    raise unusable(ValueError, "op_custom_gradient", "name", required=required, got=name, fix=fix)


def _name_taken(name: str, registered: Any, f: Op) -> ValueError:
    earlier = _definition_of(registered)
    return ValueError(
        message(
            name,
            "the name is registered for another object, or with another closure, other defaults or options",
            argument="'name'",
            required="one op per name",
            got=f"{_origin(f)}; registered is {_origin(registered if earlier is None else earlier.f)}",
            fix="rename or omit one of them, or pass the values that the function closes over as arguments; "
            "only a `def` at the top level of its module can be defined again",
            see="in-a-model#name-is-taken",
        )
    )


def _origin(f: Any) -> str:
    return f"{name_of(f)} of the module {getattr(f, '__module__', type(f).__module__)}"


def _is_version(old: Op, new: Op) -> bool:
    """Return whether `new` is a later version of the function `old`: a function of the same name and module.

    Lambdas and functions in functions have no versions.
    """
    functions = isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType)
    names = [(f.__module__, f.__qualname__) for f in (old, new)] if functions else []
    return functions and names[0] == names[1] and "<" not in new.__qualname__


def _is_same(old: _Definition, new: _Definition) -> bool:
    """Return whether two definitions are one function, or have the same code and defaults and no closure."""
    f, g = old.f, new.f
    are_plain = type(f) is type(g) is types.FunctionType and not f.__closure__
    is_same = f is g or (are_plain and _parts(f) == _parts(g))
    return is_same and old.higher_order == new.higher_order


def _parts(f: Any) -> tuple[Any, ...]:
    """Return the code of a function, its globals and its defaults, all but the code by their ids."""
    keywords = {name: id(value) for name, value in (f.__kwdefaults__ or {}).items()}
    return f.__code__, id(f.__globals__), [*map(id, f.__defaults__ or ())], keywords
