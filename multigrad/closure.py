"""Lift the tensors out of a function's closure, and put them back.

A user writes a rule as a closure over what it needs. A framework composes what it can see: residuals
handed over in the open. `lift` turns the first into the second: it finds the tensors in the function's
cells, defaults and partials, and in the containers and inner functions there, and returns them with a
template that makes an equal function around any others of their kind.

What is left where it stands, and why:

- a cell that the function assigns (`nonlocal`) is its state: a copy would lose what it writes there;
- a container or function in a cell of `shared` belongs to somebody else (an enclosing scope), who may
  be counting on its identity: a list that collects what passes, say;
- an object of an unknown class may have an identity that matters (`self`). It is never copied, and
  `Lifted.opaque` says that tensors may be hidden in one.
"""

import dis
import enum
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class TypeSet(dict[type, bool]):
    """Membership of types in a class hierarchy, looked up once per type.

    ```python
    floats = TypeSet(float)
    assert floats[float] and not floats[int]
    ```
    """

    def __init__(self, *bases: type) -> None:
        super().__init__()
        self._bases = bases

    def __missing__(self, kind: type) -> bool:
        self[kind] = found = issubclass(kind, self._bases)
        return found


# Kinds of object that hold no tensor of a call, whatever else they are.
_ATOMS = TypeSet(
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), slice, range,
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, enum.Enum, np.dtype,
    np.generic, np.ndarray, np.ufunc,
)  # fmt: skip


def lift(obj: Any, tensor_types: TypeSet, owner: Any = None) -> tuple[list[Any], Any, bool]:
    """Separate `obj`, usually a function, from the tensors that it closes over.

    ```python
    rule = (lambda e: lambda upstream: upstream * e)(ops.ones(3))
    tensors, template, opaque = lift(rule, TypeSet(Tensor))
    assert restore(template, [2.0])(3.0) == 6.0
    ```

    Arguments:
        obj: a function, partial, bound method, or a container of them.
        tensor_types: the types that count as tensors.
        owner: the function that made `obj`, if any. Out of the cells that it closes over itself, only
            tensors are lifted.

    Returns:
        The tensors; the rest as a template for `restore`, which is the object itself where there are
        none; and whether an object of an unknown class stands in the closure, through which other
        tensors may be reached.
    """
    if type(obj) is types.FunctionType and (_CODES.get(id(obj.__code__)) or _read_code(obj.__code__)).flat:
        # Most rules close over tensors and atoms alone, and need no walk.
        tensors: list[Any] = []
        cells: list[Any] = list(obj.__closure__ or ())
        for place, cell in enumerate(cells):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                break
            if tensor_types[type(content)]:
                cells[place] = len(tensors)
                tensors.append(content)
            elif not _ATOMS[type(content)]:
                break
        else:
            if not (obj.__defaults__ or obj.__kwdefaults__):
                flat = obj.__code__, obj.__globals__, cells
                return tensors, _FlatFunction(flat) if tensors else obj, False
    walk = _Walk(tensor_types, frozenset(map(id, _cells(owner, set()))))
    template = walk.lift(obj)
    return walk.tensors, template, walk.opaque


def _cells(function: Any, seen: set[int]) -> Iterator[types.CellType]:
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            return
    for cell in function.__closure__ or ():
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        yield cell
        content = _content(cell)
        if callable(content):
            yield from _cells(content, seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet, and may never be read
        return None


class _Code(NamedTuple):
    """What the code of a function tells about lifting out of it."""

    code: types.CodeType  # kept alive, so that its id stays its own
    assigned: frozenset[int]  # the free variables that it, or a function within it, assigns, by place
    flat: bool  # whether that is none, and it is no wrapper, so that cells are all there is to look at


_CODES: dict[int, _Code] = {}  # by id: to hash a code object costs as much as a whole walk
_KEPT = 4096


def _read_code(code: types.CodeType) -> _Code:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= {constant.co_freevars[place] for place in _read_code(constant).assigned}
    if len(_CODES) >= _KEPT:
        _CODES.clear()
    assigned = frozenset(place for place, name in enumerate(code.co_freevars) if name in names)
    flat = not assigned and not code.co_flags & inspect.CO_VARARGS
    found = _CODES[id(code)] = _Code(code, assigned, flat)
    return found


class _Slot(int):
    """The place of one tensor among those that were lifted."""


_SLOTS = [_Slot(place) for place in range(64)]


class _Made(NamedTuple):
    """A container, partial or method that is made anew from its parts."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]


class _Function:
    """A function that is made anew with other cells; it keeps nothing of the old one's tensors."""

    __slots__ = ("cells", "code", "extras", "globals", "key")

    def __init__(
        self, key: int, function: types.FunctionType, cells: list[Any], extras: list[Any] | None
    ) -> None:
        self.key = key
        self.code = function.__code__
        self.globals = function.__globals__
        self.cells = cells  # a cell of the old function, or a template of what stands in a new one
        self.extras = extras  # names, defaults, keyword defaults and attributes, where there are any


class _FlatFunction(tuple[types.CodeType, dict[str, Any], list[Any]]):
    """A function whose cells hold tensors and atoms alone: its code, its globals and its cells.

    Of these each is the old function's, or the place of the tensor that stands in a new one.
    """

    __slots__ = ()


class _Recursion(NamedTuple):
    """A function that stands in its own closure."""

    key: int


class _Walk:
    """One walk through an object; `lift` returns its argument itself when it finds no tensor in it."""

    __slots__ = ("_open", "_shared", "_slots", "_tensor_types", "opaque", "tensors")

    def __init__(self, tensor_types: TypeSet, shared: frozenset[int]) -> None:
        self.tensors: list[Any] = []
        self.opaque = False
        self._tensor_types = tensor_types
        self._shared = shared
        self._slots: dict[int, _Slot] = {}
        self._open: list[int] = []  # functions whose closure is being walked

    def lift(self, obj: Any) -> Any:
        kind = type(obj)
        if self._tensor_types[kind]:
            slot = self._slots.get(id(obj))  # one tensor in two places is one residual
            if slot is None:
                self._slots[id(obj)] = slot = _Slot(len(self.tensors))
                self.tensors.append(obj)
            return slot
        if _ATOMS[kind]:
            return obj
        return self.function(obj) if kind is types.FunctionType else self._container(obj, kind)

    def function(self, function: types.FunctionType) -> Any:
        key, code = id(function), function.__code__
        if key in self._open:
            return _Recursion(key)
        self._open.append(key)
        shared = self._shared
        assigned = (_CODES.get(id(code)) or _read_code(code)).assigned
        cells: list[Any] = list(function.__closure__ or ())
        changed = recursive = False
        for i, cell in enumerate(cells):
            if i in assigned:
                continue
            content = _content(cell)
            if id(cell) in shared and not self._tensor_types[type(content)]:
                continue
            lifted = self.lift(content)
            if lifted is not content:
                cells[i] = lifted
                if type(lifted) is _Recursion and lifted.key == key:
                    recursive = True
                else:
                    changed = True
        extras = None
        # To look at `__dict__` makes one. Only a wrapper, or a function that knows itself, uses its own.
        own = function.__dict__ if recursive or code.co_flags & inspect.CO_VARARGS else None
        if own or function.__defaults__ or function.__kwdefaults__:
            old = [function.__defaults__, function.__kwdefaults__, own]
            lifted = [self.lift(part) for part in old]
            changed |= any(new is not part for new, part in zip(lifted, old, strict=True))
            extras = [function.__name__, function.__qualname__, *lifted]
        self._open.pop()
        return _Function(key, function, cells, extras) if changed else function

    def _container(self, obj: Any, kind: type) -> Any:
        parts: Sequence[Any]
        make: Callable[[list[Any]], Any]
        if kind is tuple or kind is list:
            parts, make = obj, kind
        elif kind is dict or kind is OrderedDict:
            parts, make = tuple(obj.values()), functools.partial(_mapping, kind, tuple(obj))
        elif kind is functools.partial:
            parts, make = (obj.func, obj.args, obj.keywords), _partial
        elif kind is types.MethodType:
            parts, make = (obj.__func__, obj.__self__), _method
        elif issubclass(kind, tuple) and hasattr(kind, "_make"):
            parts, make = obj, kind._make
        else:
            self.opaque = True
            return obj
        lifted = [self.lift(part) for part in parts]
        if all(new is old for new, old in zip(lifted, parts, strict=True)):
            return obj
        return _Made(make, lifted)


def _mapping(kind: type, keys: tuple[Any, ...], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _partial(parts: list[Any]) -> Any:
    function, args, keywords = parts
    return functools.partial(function, *args, **keywords)


def _method(parts: list[Any]) -> Any:
    return types.MethodType(*parts)


def restore(template: Any, tensors: Sequence[Any]) -> Any:
    """Build the object that `template` describes around `tensors`."""
    if type(template) is _FlatFunction:
        code, scope, cells = template
        cells = cells.copy()
        for place, cell in enumerate(cells):
            if type(cell) is int:
                cells[place] = types.CellType(tensors[cell])
        return types.FunctionType(code, scope, None, None, tuple(cells))
    return _build(template, tensors, {})


def _build(template: Any, tensors: Sequence[Any], functions: dict[int, Any]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return tensors[template]
    if kind is _Function:
        return _build_function(template, tensors, functions)
    if kind is _Made:
        return template.make([_build(part, tensors, functions) for part in template.parts])
    if kind is _Recursion:
        return functions[template.key]
    return template


def _build_function(
    template: _Function, tensors: Sequence[Any], functions: dict[int, Any]
) -> types.FunctionType:
    parts = template.cells
    cells = tuple([part if type(part) is types.CellType else types.CellType() for part in parts])
    function = types.FunctionType(template.code, template.globals, None, None, cells)
    functions[template.key] = function  # before its cells are filled: it may stand in one of them
    for cell, part in zip(cells, parts, strict=True):
        if cell is not part:
            cell.cell_contents = tensors[part] if type(part) is _Slot else _build(part, tensors, functions)
    if template.extras:
        function.__name__, function.__qualname__, defaults, keyword_defaults, own = template.extras
        function.__defaults__ = _build(defaults, tensors, functions)
        function.__kwdefaults__ = _build(keyword_defaults, tensors, functions)
        function.__dict__.update(_build(own, tensors, functions) or {})
    return function
