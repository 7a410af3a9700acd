"""Find the tensors that an object holds in cells, defaults, containers and attributes.

Values in globals, classes and modules are constants to an op.
"""

import collections
import dis
import functools
import inspect
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

from keras import ops

from multigrad.common.type_sets import ATOMS, TypeSet

_FRAMEWORKS = frozenset({"jax", "jaxlib", "keras", "multigrad", "numpy", "tensorflow", "torch"})
_CONTAINERS = dict, types.MappingProxyType, list, tuple, set, frozenset, collections.deque
_ITERATORS = Iterator, ValuesView, ItemsView
_CONSTANTS = types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type

UNREADABLE: list[type] = [Iterator]
"""Types whose objects may hold tensors that cannot be found. A backend adds those of its framework."""


def content_of(cell: types.CellType) -> Any:
    """Return the content of a cell, None if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def parts_of(obj: Any) -> list[Any]:
    """Return the objects in the cells, defaults, items and attributes of an object."""
    if isinstance(obj, types.FunctionType):
        cells = [content_of(cell) for cell in obj.__closure__ or ()]
        return [*cells, obj.__defaults__, obj.__kwdefaults__, *vars(obj).values()]
    if isinstance(obj, functools.partial):
        return [obj.func, *obj.args, *obj.keywords.values()]
    if isinstance(obj, types.MethodType):
        return [obj.__func__, obj.__self__]
    items: list[Any] = []
    if isinstance(obj, _CONTAINERS):
        items = list(obj.values() if isinstance(obj, Mapping) else obj)
    return [*items, *_attributes_of(obj)]


def _attributes_of(obj: Any) -> list[Any]:
    values = list(getattr(obj, "__dict__", {}).values())
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = {slots} if isinstance(slots, str) else set(slots) - {"__dict__", "__weakref__"}
        values += [getattr(obj, name) for name in names if hasattr(obj, name)]
    return values


def may_hold_tensors(value: Any, seen: set[int] | None = None) -> bool:
    """Return whether an object is a tensor or may return one: it has attributes, or is an iterator or a view.

    For a container, function, partial or method, return whether this is true for one of its parts.
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
    return ops.is_tensor(value) or isinstance(value, _ITERATORS) or bool(_attributes_of(value))


def reachable_tensors(
    obj: Any,
    tensor_types: TypeSet,
    through: tuple[type, ...] = (),
    seen: set[int] | None = None,
) -> Iterator[Any]:
    """Yield the tensors that can be reached from `obj`, usually a function.

    Arguments:
        obj: the root of the search.
        tensor_types: the types that count as tensors.
        through: the classes of a framework whose objects are searched.
        seen: the ids of objects that have been searched.
    """
    seen = set() if seen is None else seen
    waiting = [obj]
    while waiting:
        obj = waiting.pop()
        kind = type(obj)
        if tensor_types[kind]:
            yield obj
            continue
        if isinstance(obj, (types.BuiltinFunctionType, types.MethodWrapperType)):
            waiting.append(obj.__self__)  # of a bound method such as `dict.get`
            continue
        if ATOMS[kind] or isinstance(obj, _CONSTANTS) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, (ValuesView, ItemsView)):
            waiting += obj
        elif kind is types.FunctionType:
            waiting += parts_of(obj)
        elif _is_foreign(kind) and not isinstance(obj, (*_CONTAINERS, *through)):
            waiting += wrapped_functions(obj) or ()
        else:
            waiting += parts_of(obj)


def path_to_tensor(
    function: Any,
    arguments: Iterable[tuple[str, Any]],
    tensor_types: TypeSet,
    is_wanted: Callable[[Any], bool],
) -> str | None:
    """Return where a function finds a tensor, such as "'scale'" or "'self'.factor", None if it is not found.

    The search covers the names that the function uses, its arguments, and their items and attributes.
    """
    function = inspect.unwrap(getattr(function, "func", getattr(function, "__func__", function)))
    places = list(arguments)
    if isinstance(function, types.FunctionType):
        code, scope = function.__code__, function.__globals__
        cells = map(content_of, function.__closure__ or ())
        places += zip(map(repr, code.co_freevars), cells, strict=True)
        places += [(repr(name), scope[name]) for name in code.co_names if name in scope]
    for name, obj in places:
        items = dict(enumerate(obj)) if isinstance(obj, (list, tuple)) else obj
        paths = {name: obj}
        if isinstance(items, dict):
            paths |= {f"{name}[{key!r}]": part for key, part in items.items()}
        paths |= {f"{name}.{attribute}": part for attribute, part in getattr(obj, "__dict__", {}).items()}
        for path, part in paths.items():
            if tensor_types[type(part)] and is_wanted(part):
                return path
    return None


def wrapped_functions(obj: Any) -> list[Any] | None:
    """Return the user's functions in an object of a framework, such as a result of `jax.jit`.

    Return None for other objects.
    """
    if isinstance(obj, type) or not (_is_of_framework(type(obj).__module__) and hasattr(obj, "__wrapped__")):
        return None
    return [obj.__wrapped__, *filter(callable, getattr(obj, "__dict__", {}).values())]


def _is_foreign(kind: type) -> bool:
    """Return whether a class belongs to a framework. Objects of this package may hold a user's function."""
    return _is_of_framework(kind.__module__) and kind.__module__.partition(".")[0] != "multigrad"


def _is_of_framework(module: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS


@functools.lru_cache(4096)
def assigned_cells(code: types.CodeType) -> tuple[int, ...]:
    """Return the indices of the cells that code, or the code of a function in it, assigns (`nonlocal`).

    They are read from the bytecode. A copy of the function must share these cells with it.
    """
    return tuple(map(code.co_freevars.index, _assigned_names(code)))


def _assigned_names(code: types.CodeType) -> set[str]:
    """Return the free variables that the code assigns."""
    stores = ("STORE_DEREF", "DELETE_DEREF")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in stores}
    for inner in filter(inspect.iscode, code.co_consts):
        names |= _assigned_names(inner)
    return names & set(code.co_freevars)
