"""Which tensors an object holds: in cells, defaults, containers and attributes, and nowhere else.

What stands in a global, a class or a module is a constant to an op.
"""

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

from keras import ops

from multigrad.core.type_sets import ATOMS, TypeSet

_FRAMEWORKS = frozenset({"jax", "jaxlib", "keras", "multigrad", "numpy", "tensorflow", "torch"})
_CONTAINERS = dict, list, tuple, set, frozenset
_CONSTANTS = types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type


def content_of(cell: types.CellType) -> Any:
    """Return what a cell holds, None while its name is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def parts_of(obj: Any) -> list[Any]:
    """Return what an object refers to by cells, defaults, items and attributes."""
    if isinstance(obj, types.FunctionType):
        cells = [content_of(cell) for cell in obj.__closure__ or ()]
        return [*cells, obj.__defaults__, obj.__kwdefaults__, *vars(obj).values()]
    if isinstance(obj, functools.partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    items: list[Any] = []
    if isinstance(obj, _CONTAINERS):
        items = list(obj.values() if isinstance(obj, dict) else obj)
    return [*items, *_attributes_of(obj)]


def _attributes_of(obj: Any) -> list[Any]:
    values = list(getattr(obj, "__dict__", {}).values())
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = {slots} if isinstance(slots, str) else set(slots) - {"__dict__", "__weakref__"}
        values += [getattr(obj, name) for name in names if hasattr(obj, name)]
    return values


def may_hold_tensors(value: Any, seen: set[int] | None = None) -> bool:
    """Return whether an object is a tensor, or has attributes, in which it may hold tensors now or later.

    A container, function, partial or method may where one of its parts may.
    """
    seen = set() if seen is None else seen
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        value = value.__self__  # a module, or the object of a bound method such as `dict.get`
    if ATOMS[type(value)] or isinstance(value, _CONSTANTS) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, *_CONTAINERS)):
        return any([may_hold_tensors(part, seen) for part in parts_of(value)])
    functions = wrapped_functions(value)
    if functions is not None:
        return any([may_hold_tensors(function, seen) for function in functions])
    return ops.is_tensor(value) or bool(_attributes_of(value))


def reachable_tensors(
    obj: Any,
    tensor_types: TypeSet,
    through: tuple[type, ...] = (),
    seen: set[int] | None = None,
    with_globals: bool = False,
) -> Iterator[Any]:
    """Yield the tensors that are reached from `obj`, usually a function.

    Arguments:
        obj: where to begin.
        tensor_types: the types that count as tensors.
        through: classes of a framework whose objects are looked into; those of others are not.
        seen: the ids of objects that are not looked into again.
        with_globals: whether the globals that a function names count, too.
    """
    seen = set() if seen is None else seen
    waiting = [obj]
    while waiting:
        obj = waiting.pop()
        kind = type(obj)
        if tensor_types[kind]:
            yield obj
            continue
        if ATOMS[kind] or isinstance(obj, _CONSTANTS) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if kind is types.FunctionType:
            waiting += parts_of(obj)
            if with_globals and not _is_of_framework(obj.__globals__.get("__name__", "")):
                waiting += map(obj.__globals__.get, obj.__code__.co_names)
        elif _is_foreign(kind) and not isinstance(obj, (*_CONTAINERS, *through)):
            waiting += wrapped_functions(obj) or ()
        else:
            waiting += parts_of(obj)


def wrapped_functions(obj: Any) -> list[Any] | None:
    """Return the user's functions in a framework's object, as of `jax.jit`; None for other objects."""
    if isinstance(obj, type) or not (_is_of_framework(type(obj).__module__) and hasattr(obj, "__wrapped__")):
        return None
    return [obj.__wrapped__, *filter(callable, getattr(obj, "__dict__", {}).values())]


def _is_foreign(kind: type) -> bool:
    """Whether a class is a framework's. Objects of this package may hold a user's function."""
    return _is_of_framework(kind.__module__) and kind.__module__.partition(".")[0] != "multigrad"


def _is_of_framework(module: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS


_ASSIGNED: dict[types.CodeType, frozenset[int]] = {}
_KEPT = 4096


def assigned_cells(function: types.FunctionType) -> frozenset[int]:
    """Return the indices of the cells that a function, or one defined in it, assigns (`nonlocal`).

    The bytecode alone tells that. A copy of the function around other tensors must share such a cell with it.
    """
    code = function.__code__
    if not code.co_freevars:
        return frozenset()
    assigned = _ASSIGNED.get(code)
    if assigned is None:
        if len(_ASSIGNED) >= _KEPT:
            _ASSIGNED.clear()
        assigned = _ASSIGNED[code] = frozenset(map(code.co_freevars.index, _assigned_names(code)))
    return assigned


def _assigned_names(code: types.CodeType) -> set[str]:
    """The free variables that a code assigns."""
    stores = ("STORE_DEREF", "DELETE_DEREF")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in stores}
    for inner in filter(inspect.iscode, code.co_consts):
        names |= _assigned_names(inner)
    return names & set(code.co_freevars)
