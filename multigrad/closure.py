"""Lift the tensors out of a function's closure, and put them back.

A user writes a rule as a closure over what it needs. A framework composes what it can see: residuals
handed over in the open. `lift` turns the first into the second: it finds the tensors in the function's
cells, defaults and partials, and in the containers and inner functions there, and returns them with a
template that makes an equal function around any others of their kind.

What is left where it stands, and why:

- a cell that the function assigns (`nonlocal`) is its state: a copy would lose what it writes there;
- a cell of `shared` belongs to somebody else (an enclosing scope), so its content is no residual;
- an object of an unknown class may have an identity that matters (`self`). It is never copied, and
  `Lifted.opaque` says that tensors may be hidden in one.
"""

import dis
import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Kinds of object that hold no tensor of a call, whatever else they are.
_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), slice, range,
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, enum.Enum, np.dtype,
    np.generic, np.ndarray, np.ufunc,
)  # fmt: skip


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


@dataclass(slots=True)
class Lifted:
    """What `lift` found: the tensors, and the rest of the object as a template.

    `opaque` is true when an object of an unknown class stands in the closure, so that tensors may be
    reached through it that are not in `tensors`.
    """

    tensors: list[Any]
    template: Any
    opaque: bool

    def restore(self, tensors: Sequence[Any]) -> Any:
        """The object again, around `tensors`, which stand where the lifted ones stood."""
        return restore(self.template, tensors)


def lift(obj: Any, tensor_types: TypeSet, shared: frozenset[int] = frozenset()) -> Lifted:
    """Separate `obj`, usually a function, from the tensors that it closes over.

    ```python
    rule = (lambda e: lambda upstream: upstream * e)(ops.ones(3))
    lifted = lift(rule, TypeSet(Tensor))
    assert lifted.restore([2.0])(3.0) == 6.0
    ```

    Arguments:
        obj: a function, partial, bound method, or a container of them.
        tensor_types: the types that count as tensors.
        shared: the `id`s of cells whose contents are not to be lifted (see `cells_of`).

    Returns:
        A `Lifted`. When there is no tensor in it, its template is `obj` itself.
    """
    lifter = _Lifter(tensor_types, shared)
    template = lifter.lift(obj)
    return Lifted(lifter.tensors, template, lifter.opaque)


def cells_of(function: Any) -> frozenset[int]:
    """The `id`s of the cells that `function` closes over, those of functions in them included."""
    return frozenset(id(cell) for cell in _cells(function, set()))


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


_EMPTY = None  # stands for what is not looked into


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet: the function may never read it
        return _EMPTY


_ASSIGNED: dict[types.CodeType, frozenset[str]] = {}
_KEPT_CODES = 4096


def _assigned(code: types.CodeType) -> frozenset[str]:
    """The free variables that `code`, or a function within it, assigns or deletes."""
    found = _ASSIGNED.get(code)
    if found is None:
        names = {
            i.argval
            for i in dis.get_instructions(code)
            if i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars
        }
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names |= _assigned(constant) & set(code.co_freevars)
        if len(_ASSIGNED) >= _KEPT_CODES:
            _ASSIGNED.clear()
        _ASSIGNED[code] = found = frozenset(names)
    return found


class _Slot(int):
    """The place of one tensor among those that were lifted."""


@dataclass(slots=True)
class _Made:
    """A container, partial or method that is made anew from its parts."""

    make: Callable[[list[Any]], Any]
    parts: list[Any]


@dataclass(slots=True)
class _Function:
    """A function that is made anew with other cells; it keeps nothing of the old one's tensors."""

    key: int
    code: types.CodeType
    globals: dict[str, Any]
    name: str
    qualname: str
    defaults: Any
    keyword_defaults: Any
    attributes: Any
    cells: list[Any]  # a cell of the old function, or a template of what stands in a new one


@dataclass(slots=True)
class _Recursion:
    """A function that stands in its own closure."""

    key: int


class _Lifter:
    """One walk through an object. `lift` returns its argument itself when it holds no tensor."""

    def __init__(self, tensor_types: TypeSet, shared: frozenset[int]) -> None:
        self.tensors: list[Any] = []
        self.opaque = False
        self._tensor_types = tensor_types
        self._shared = shared
        self._slots: dict[int, _Slot] = {}  # one tensor in two places is one residual
        self._open: set[int] = set()  # functions whose closure is being walked

    def lift(self, obj: Any) -> Any:
        kind = type(obj)
        if self._tensor_types[kind]:
            return self._tensor(obj)
        if kind is types.FunctionType:
            return self._function(obj)
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
            self.opaque |= not issubclass(kind, _ATOMS)
            return obj
        lifted = [self.lift(part) for part in parts]
        if all(new is old for new, old in zip(lifted, parts, strict=True)):
            return obj
        return _Made(make, lifted)

    def _tensor(self, tensor: Any) -> _Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            self._slots[id(tensor)] = slot = _Slot(len(self.tensors))
            self.tensors.append(tensor)
        return slot

    def _function(self, function: types.FunctionType) -> Any:
        closure = function.__closure__
        if not (closure or function.__defaults__ or function.__kwdefaults__ or function.__dict__):
            return function
        key = id(function)
        if key in self._open:
            return _Recursion(key)
        self._open.add(key)
        state = _assigned(function.__code__)
        changed = False
        cells: list[Any] = []
        for name, cell in zip(function.__code__.co_freevars, closure or (), strict=True):
            content = _EMPTY if name in state or id(cell) in self._shared else _content(cell)
            lifted = self.lift(content)
            if lifted is content:
                lifted = cell
            elif not (type(lifted) is _Recursion and lifted.key == key):
                changed = True
            cells.append(lifted)
        old = (function.__defaults__, function.__kwdefaults__, function.__dict__ or None)
        new = [self.lift(part) for part in old]
        self._open.discard(key)
        if not changed and all(a is b for a, b in zip(old, new, strict=True)):
            return function
        return _Function(
            key,
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__qualname__,
            *new,
            cells,
        )


def _mapping(kind: type, keys: tuple[Any, ...], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _partial(parts: list[Any]) -> Any:
    function, args, keywords = parts
    return functools.partial(function, *args, **keywords)


def _method(parts: list[Any]) -> Any:
    return types.MethodType(*parts)


def restore(template: Any, tensors: Sequence[Any]) -> Any:
    """Build the object that `template` describes around `tensors`."""
    return _build(template, tensors, {})


def _build(template: Any, tensors: Sequence[Any], functions: dict[int, Any]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return tensors[template]
    if kind is _Made:
        return template.make([_build(part, tensors, functions) for part in template.parts])
    if kind is _Recursion:
        return functions[template.key]
    if kind is not _Function:
        return template
    cells = tuple(
        cell if type(cell) is types.CellType else types.CellType() for cell in template.cells
    )
    function = types.FunctionType(template.code, template.globals, template.name, None, cells)
    functions[template.key] = function
    for cell, content in zip(cells, template.cells, strict=True):
        if cell is not content:
            cell.cell_contents = _build(content, tensors, functions)
    function.__qualname__ = template.qualname
    function.__defaults__ = _build(template.defaults, tensors, functions)
    function.__kwdefaults__ = _build(template.keyword_defaults, tensors, functions)
    if template.attributes:
        function.__dict__.update(_build(template.attributes, tensors, functions))
    return function
