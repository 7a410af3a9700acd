"""What stands behind an object, and behind the globals that a function uses: whether tensors may be reached.

Said once for each code, and asked again where a name, or a container, has got something else since.
"""

import builtins
import contextvars
import dis
import gc
import inspect
import operator
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from multigrad.kinds import ATOMS, TypeSet
from multigrad.namespaces import (
    Probe,
    code_within,
    imported,
    is_library,
    is_library_module,
    is_of_framework,
    names_in,
    operands,
)


def content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet, and may never be read
        return None


def captured_by(function: types.FunctionType) -> list[Any]:
    """What a function closes over and has for defaults."""
    cells = [content_of(cell) for cell in function.__closure__ or ()]
    return [*cells, function.__defaults__, function.__kwdefaults__]


@dataclass(slots=True)
class _Finding:
    """Whether there may be tensors behind names."""

    opaque: bool
    probes: list[Probe]  # what it is not opaque by, but may be once something else stands there
    containers: list[tuple[Any, list[Any]]]  # the same for containers among these, with what stands in each

    def is_stale(self) -> bool:
        """Whether something else is there."""
        for space, name, value in self.probes:  # no comprehension, which is a call
            if space.get(name) is not value:
                return True
        return any(not _are(_parts_of(container), parts) for container, parts in self.containers)


@dataclass(slots=True)
class _Code(_Finding):
    """What the code of a function tells about lifting out of it, opaque for what is behind its globals."""

    code: types.CodeType  # kept alive, so that its id stays its own
    scope: dict[str, Any]  # the namespace that was read
    assigned: frozenset[int]  # the free variables that it, or a function within it, assigns, by place
    flat: bool  # whether its cells are all there is to look at, and defaults by position
    cells: int  # how many cells it has

    def is_stale_for(self, function: types.FunctionType) -> bool:
        """Whether something else is there, or the code is run in another namespace than the one read."""
        return bool(self.probes) and (self.scope is not function.__globals__ or self.is_stale())


@dataclass(slots=True)
class _Module(_Finding):
    """What is behind a module by the names in a code."""

    code: types.CodeType  # kept alive, both, so that their ids stay their own
    module: types.ModuleType


CODES: dict[int, _Code] = {}  # by id: to hash a code object costs as much as a whole walk
_MODULES: dict[tuple[int, int], _Module] = {}
_KEPT = 4096


def code_of(function: types.FunctionType) -> _Code:
    known = CODES.get(id(function.__code__))
    return _read_code(function) if known is None or known.is_stale_for(function) else known


def _read_code(function: types.FunctionType) -> _Code:
    code = function.__code__
    assigned = frozenset(_assigned_places(code))
    found = opaque, _, _ = _Search().by_name(function)
    wrapper = code.co_flags & inspect.CO_VARARGS  # of which attributes may tell more
    flat = not (assigned or opaque or wrapper or code.co_kwonlyargcount)
    if len(CODES) >= _KEPT:
        CODES.clear()
    CODES[id(code)] = _Code(*found, code, function.__globals__, assigned, flat, len(code.co_freevars))
    return CODES[id(code)]


def may_hold_by_module(module: types.ModuleType, code: types.CodeType) -> bool:
    """Whether tensors may be reached through what such a code may use of a module."""
    if is_library_module(module):
        return False
    known = _MODULES.get((id(code), id(module)))
    if known is None or known.is_stale():
        if len(_MODULES) >= _KEPT:
            _MODULES.clear()
        known = _Module(*_Search().by_module(module, code), code, module)
        _MODULES[id(code), id(module)] = known
    return known.opaque


_Found = tuple[bool, list[Probe], list[tuple[Any, list[Any]]]]
"""What a `_Finding` is made of."""


class _Search:
    """A search for tensors behind the names that a function uses, and those that it calls with them.

    A module or class may be handed to any of these, so it is looked into by the names that all of them use.
    """

    def __init__(self) -> None:
        self._probes: list[Probe] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._seen: set[int] = set()
        self._names: set[str] = set()
        self._spaces: list[tuple[Mapping[str, Any], set[str]]] = []  # each with the names looked up in it

    def by_name(self, function: types.FunctionType) -> _Found:
        """Behind the globals that a function uses, and the modules that it imports."""
        return self._found(self._by_name(function))

    def by_module(self, module: types.ModuleType, code: types.CodeType) -> _Found:
        """Behind what a code may use of a module."""
        self._names |= names_in(code)
        return self._found([module])

    def _found(self, waiting: list[Any]) -> _Found:
        return (True, [], []) if self._may_hold(waiting) else (False, self._probes, self._containers)

    def _may_hold(self, waiting: list[Any]) -> bool:
        while waiting or (waiting := self._in_spaces()):
            value = waiting.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            leads = self._leads(value)
            if leads is None:
                if may_hold(value):
                    return True
            else:
                waiting += leads
        return False

    def _leads(self, value: Any) -> list[Any] | None:
        """Where it leads to, None where there are no names to tell."""
        if isinstance(value, types.FunctionType):
            if is_library(value.__globals__.get("__name__", "")):  # around a user's, as that of an op
                self._spaces.append((vars(value), set()))
                return [vars(value).get("__wrapped__")]
            parts = _parts_of(value)
            self._containers.append((value, parts))
            return [*parts, vars(value), *self._by_name(value)]
        if isinstance(value, types.ModuleType):
            self._spaces.append((vars(value), set()))
            return []
        if (functions := functions_within(value)) is not None:
            return functions
        if isinstance(value, type):
            bases = [base for kind in (value, type(value)) for base in kind.__mro__]
            self._spaces += [(vars(base), set()) for base in bases if not is_library(base.__module__)]
            return []
        if isinstance(value, (dict, list, tuple)):
            parts = _parts_of(value)
            if not isinstance(value, tuple):
                self._containers.append((value, parts))
            return [*parts, getattr(value, "__dict__", None)]
        return None

    def _in_spaces(self) -> list[Any]:
        """What stands in the modules and classes by names that have come up since they were looked into."""
        found: list[Any] = []
        for space, looked in self._spaces:
            found += self._through(space, self._names - looked)
            looked |= self._names
        return found

    def _by_name(self, function: types.FunctionType) -> list[Any]:
        code, scope = function.__code__, function.__globals__
        self._names |= names_in(code)
        if is_of_framework(scope.get("__name__", "")):
            return []
        used = frozenset(operands(code, "LOAD_GLOBAL", "LOAD_NAME"))
        used -= vars(builtins).keys() - scope.keys()
        modules = frozenset([whole for name in imported(code, scope) for whole in (name, name.split(".")[0])])
        # A module that was not imported yet holds nothing of a call.
        return [*self._through(scope, used), *self._through(sys.modules, modules)]

    def _through(self, namespace: Mapping[str, Any], names: Set[str]) -> list[Any]:
        found: list[Any] = []
        self._probes += [(namespace, name, None) for name in names - namespace.keys()]
        for name in names & namespace.keys():
            value = namespace[name]
            if is_library_module(value):
                continue  # which nobody rebinds, and nearly every function uses
            self._probes.append((namespace, name, value))
            if not _is_made_by_library(value):
                found.append(value)
        return found


def _parts_of(container: Any) -> list[Any]:
    """What stands in a container, or in the cells and defaults of a function, but for numbers, texts and the
    like, which may come and go.
    """
    if isinstance(container, types.FunctionType):
        parts: Iterable[Any] = captured_by(container)
    else:
        parts = container.values() if isinstance(container, dict) else container
    return [part for part in parts if not ATOMS[type(part)]]


def _are(parts: list[Any], others: list[Any]) -> bool:
    """Whether they are the very same objects."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _is_made_by_library(value: Any) -> bool:
    return isinstance(value, (*_DEFINITIONS, types.FunctionType)) and is_library(
        getattr(value, "__module__", None) or ""
    )


def assigned_places(function: types.FunctionType) -> frozenset[int]:
    """The places of the free variables that a function, or one within it, assigns."""
    return (CODES.get(id(function.__code__)) or _read_code(function)).assigned


def _assigned_places(code: types.CodeType) -> Iterator[int]:
    stores = ("STORE_DEREF", "DELETE_DEREF")
    names = {i.argval for i in dis.get_instructions(code) if i.opname in stores}
    for inner in code_within(code):
        names |= {inner.co_freevars[place] for place in _assigned_places(inner)}
    return (place for place, name in enumerate(code.co_freevars) if name in names)


_DEFINITIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type)


def may_hold(value: Any, seen: set[int] | None = None) -> bool:
    """Whether tensors may be reached through an object; those of a module or class are looked for by name."""
    seen = set() if seen is None else seen
    if ATOMS[type(value)] or isinstance(value, _DEFINITIONS) or id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        return any([may_hold(part, seen) for part in (*captured_by(value), *vars(value).values())])
    if isinstance(value, (dict, list, tuple)):
        parts = value.values() if isinstance(value, dict) else value
        return any(may_hold(part, seen) for part in (*parts, *getattr(value, "__dict__", {}).values()))
    # What is not tracked refers to nothing, but a ContextVar tells no collector what it holds.
    return isinstance(value, contextvars.ContextVar) or gc.is_tracked(value)


def tensors_behind(
    obj: Any, tensor_types: TypeSet, through: tuple[type, ...] = (), seen: set[int] | None = None
) -> Iterator[Any]:
    """The tensors that are reached through `obj`, usually a function, and through a user's objects in turn.

    What a framework's own object holds is not among them, unless it is one of `through`. Of a user's module
    or class, it is what a function that knows it names. What was `seen`, by the ids of objects that live on,
    is not looked at again.

    ```python
    held = types.SimpleNamespace(factors=[ops.ones(3)])
    assert len(list(tensors_behind(lambda x: x * held.factors[0], TypeSet(Tensor)))) == 1
    ```
    """
    seen = set() if seen is None else seen
    waiting = [obj]
    while waiting:
        obj = waiting.pop()
        kind = type(obj)
        if tensor_types[kind]:
            yield obj
        elif not (ATOMS[kind] or isinstance(obj, (type, types.ModuleType)) or id(obj) in seen):
            seen.add(id(obj))
            if kind is types.FunctionType:
                scope = obj.__globals__
                known = [*captured_by(obj), *vars(obj).values()]
                if not is_of_framework(scope.get("__name__", "")):
                    known += map(scope.get, operands(obj.__code__, "LOAD_GLOBAL", "LOAD_NAME"))
                waiting += known
                waiting += _named_in(obj.__code__, known)
            elif is_of_framework(kind.__module__) and not isinstance(obj, (*_CONTAINERS, *through)):
                waiting += functions_within(obj) or ()
            else:
                waiting += gc.get_referents(obj)  # the collector knows of attributes and slots alike


_CONTAINERS = list, tuple, dict, set


def _named_in(code: types.CodeType, known: list[Any]) -> Iterator[Any]:
    """What a code may use of the modules and classes among the things that it knows."""
    for space in known:
        if isinstance(space, types.ModuleType) and not is_library_module(space):
            yield from map(vars(space).get, names_in(code))
        elif isinstance(space, type) and not is_library(space.__module__):
            yield from (inspect.getattr_static(space, name, None) for name in names_in(code))


def functions_within(obj: Any) -> list[Any] | None:
    """The user's functions in a framework's object around them, as of `jax.jit`; None for other objects."""
    if isinstance(obj, type) or not (is_of_framework(type(obj).__module__) and hasattr(obj, "__wrapped__")):
        return None  # a cache of the standard library's may hold more
    return [obj.__wrapped__, *filter(callable, getattr(obj, "__dict__", {}).values())]
