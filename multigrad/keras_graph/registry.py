"""The names under which ops are found again in a saved model.

An op that is named `package>name` is registered with Keras's serialization, once. One name stands for one
op: what is found under it at another time must be what was saved.
"""

import functools
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from multigrad.backend.base import Options
from multigrad.core.errors import describe, message
from multigrad.core.reachable import assigned_cells
from multigrad.core.signature import name_of
from multigrad.core.type_sets import HoldsNoTensor

Op = Callable[..., Any]

_PLAIN = (bool, int, str, bytes)
_LOCK = threading.RLock()  # an op may be defined while another one is


class _Definition(NamedTuple):
    """What an op was made of."""

    f: Op
    options: Options


_DEFINITIONS: dict[Op, _Definition] = {}  # of registered ops, which Keras keeps for ever


def register(name: str, f: Op, options: Options, define: Callable[[], Op]) -> Op:
    """The op of `f` that is registered as `name`: the one that is there already if it is the same.

    What `define` returns is registered in its stead where `f` is a new edition of the same function: of
    the same module and name, at the top level, as when a module is reloaded.

    Raises:
        ValueError: for a name that is none, or that stands for something else already.
    """
    package, own = _package_and_name(name)
    wanted = _Definition(f, options)
    with _LOCK:
        found = keras.saving.get_custom_objects().get(name)
        if found is not None:
            known = _definition(found)
            if known is not None and _is_same(known, wanted):
                return found
            if known is None or not _is_edition(known.f, f):
                raise _taken(name, found, f)
        op = define()
        if getattr(f, "__name__", "<lambda>") == "<lambda>":
            op.__name__ = own  # Keras saves the code of what is called a lambda
        _DEFINITIONS[op] = wanted
        return keras.saving.register_keras_serializable(package, own)(op)


def refuse_config(op: Op, title: str) -> Op:
    """Return the op, of which Keras gets no config unless it is registered.

    Keras (3.15) writes a function such as an `activation=` by its bare name, and reads `tanh` as its own.
    When it writes an object it calls `get_build_config`, if there is one: here it raises.
    """
    op.get_build_config = _Refusal(weakref.ref(op), title)  # type: ignore[attr-defined]
    return op


class _Refusal(HoldsNoTensor):
    """The error for an unnamed op that Keras writes, unless somebody registered it with Keras."""

    __slots__ = ("_op", "_title")

    def __init__(self, op: "weakref.ref[Op]", title: str) -> None:
        self._op, self._title = op, title

    def __call__(self) -> None:
        name = keras.saving.get_registered_name(self._op())
        if keras.saving.get_registered_object(name) is not self._op():
            raise without_name(self._title)


def without_name(title: str) -> NotImplementedError:
    """Return the error for an op that Keras is asked to write into a config, and could not find again."""
    return NotImplementedError(
        message(
            title,
            "an op without a registered name cannot be saved in a model, or copied by way of its config",
            required="a name of the form 'package>name'",
            got=repr(title),
            fix=f"define it with @op_custom_gradient(name='my_package>{identifier(title)}')",
        )
    )


def identifier(title: str) -> str:
    """Return the part of an op's name behind its package, as a word."""
    return re.sub(r"\W+", "_", title.rpartition(">")[2]).strip("_") or "op"


def find(name: Any) -> Op:
    """The op that is registered as `name`.

    Raises:
        TypeError: when there is none, as Keras has it for what is not registered.
    """
    found = keras.saving.get_registered_object(name) if isinstance(name, str) else None
    if found is not None and _definition(found) is not None:
        return found
    raise TypeError(
        message(
            name if isinstance(name, str) else "multigrad",
            "a saved model has an op that is not defined here",
            required="an op of this name, defined before the model is loaded",
            got=describe(name) if found is None else f"{describe(found)}, which is no op",
            fix=f"define it with @op_custom_gradient(name={name!r}), or import the module that does",
        )
    )


def _definition(found: Any) -> _Definition | None:
    return _DEFINITIONS.get(found) if isinstance(found, types.FunctionType) else None


def _package_and_name(name: str) -> list[str]:
    parts = name.split(">")
    if len(parts) == 2 and all(part and part == part.strip() for part in parts) and "/" not in name:
        return parts
    raise ValueError(
        message(
            "op_custom_gradient",
            "an op cannot be registered under this name",
            argument="'name'",
            required="'package>name', with no other '>', no '/' and no space at the ends",
            got=repr(name),
            fix="write name='my_package>my_op'; a name without '>' is for messages alone",
        )
    )


def _taken(name: str, found: Any, f: Op) -> ValueError:
    known = _definition(found)
    other = _innermost(found if known is None else known.f)
    own = _innermost(f)
    functions = type(own) is type(other) is types.FunctionType
    if functions and own.__code__ == other.__code__ and own.__globals__ is other.__globals__:
        problem = "the same function stands under this name with other values in its closure or defaults"
        fix = "pass them as arguments, or leave the name out"
    else:
        problem = "the name stands for something else already"
        fix = "give one of them another name; a `def` at the top level of its module may be defined anew"
    return ValueError(
        message(
            name,
            problem,
            argument="'name'",
            required="one op for one name",
            got=f"{_place(own)}, beside {_place(other)}",
            fix=fix,
        )
    )


def _innermost(f: Any) -> Any:
    while isinstance(f, (functools.partial, types.MethodType)):
        f = f.func if isinstance(f, functools.partial) else f.__func__
    return f


def _place(f: Any) -> str:
    return f"{name_of(f)} of the module {getattr(f, '__module__', type(f).__module__)}"


def _is_edition(old: Op, new: Op) -> bool:
    """Whether one is a later edition of the other; two lambdas in a module bear the same name."""
    functions = isinstance(old, types.FunctionType) and isinstance(new, types.FunctionType)
    names = [(f.__module__, f.__qualname__) for f in (old, new)] if functions else []
    return functions and names[0] == names[1] and "<" not in new.__qualname__


def _is_same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values do the same wherever they stand: equal code around the same objects.

    What can be changed in place is the same only if it is one object.
    """
    kind = type(a)
    if a is b or (id(a), id(b)) in seen:
        return True
    if kind is not type(b):
        return False
    seen |= {(id(a), id(b))}  # a function may stand in its own closure
    if kind in _PLAIN:
        return bool(a == b)
    if kind in (float, complex):
        return repr(a) == repr(b)  # tells 0.0 from -0.0, and knows NaN
    if kind in (tuple, Options, _Definition):
        return len(a) == len(b) and all(_is_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if kind is functools.partial:
        parts = (a.func, a.args), (b.func, b.args)
        return _is_same(*parts, seen) and _items_same(a.keywords, b.keywords, seen)
    if kind is types.MethodType:
        return _is_same((a.__func__, a.__self__), (b.__func__, b.__self__), seen)
    if kind is types.FunctionType:
        return _functions_same(a, b, seen)
    return issubclass(kind, HoldsNoTensor)  # made of a function that is compared as well


def _functions_same(a: Any, b: Any, seen: frozenset[tuple[int, int]]) -> bool:
    if a.__code__ != b.__code__ or a.__globals__ is not b.__globals__:
        return False
    assigned = assigned_cells(a)
    for place, cells in enumerate(zip(a.__closure__ or (), b.__closure__ or (), strict=True)):
        if cells[0] is not cells[1] and (place in assigned or not _cells_same(*cells, seen)):
            return False
    return (
        _is_same(a.__defaults__, b.__defaults__, seen)
        and _items_same(a.__kwdefaults__ or {}, b.__kwdefaults__ or {}, seen)
        and _items_same(a.__dict__, b.__dict__, seen)
    )


def _cells_same(a: types.CellType, b: types.CellType, seen: frozenset[tuple[int, int]]) -> bool:
    try:
        return _is_same(a.cell_contents, b.cell_contents, seen)
    except ValueError:  # a name that is not bound yet: nobody knows to what it will be
        return False


def _items_same(a: dict[str, Any], b: dict[str, Any], seen: frozenset[tuple[int, int]]) -> bool:
    return a.keys() == b.keys() and all(_is_same(a[key], b[key], seen) for key in a)
