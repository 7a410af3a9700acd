"""Lift the tensors out of a function's closure, and put them back.

A user writes a rule as a closure over what it needs. A framework composes what it can see: residuals
handed over in the open. `lift` turns the first into the second: it finds the tensors in the function's
cells, defaults and partials, and in the containers and inner functions there, and returns them with a
template that makes an equal function around any others of their kind.

What is left where it stands, and why:

- a cell that is assigned (`nonlocal`), by the function or another one in its reach, is state: a copy
  would lose what is written there;
- a container or function in a cell that an enclosing scope made belongs to somebody else, who may be
  counting on its identity: a list that collects what passes, say. Where all is borrowed, so that little
  would be left to lift, this holds for what keeps a state: lists, dicts and functions with attributes;
- an object of an unknown class may have an identity that matters (`self`), and is never copied.

Where a tensor could be reached through one of these, or through a global, the closure is called opaque.
"""

import contextvars
import functools
import gc
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from multigrad.behind import (
    CODES,
    assigned_places,
    code_of,
    content_of,
    functions_within,
    may_hold_by_module,
)
from multigrad.kinds import ATOMS, TypeSet
from multigrad.namespaces import is_library_module

_NO_CELLS: frozenset[int] = frozenset()


def lift(
    obj: Any, tensor_types: TypeSet, owner: Any = None, borrowed: bool = False
) -> tuple[list[Any], Any, bool]:
    """Separate `obj`, usually a function, from the tensors that it closes over.

    ```python
    rule = (lambda e: lambda upstream: upstream * e)(ops.ones(3))
    tensors, template, opaque = lift(rule, TypeSet(Tensor))
    assert restore(template, [2.0])(3.0) == 6.0
    ```

    Arguments:
        obj: a function, partial, bound method or another callable.
        tensor_types: the types that count as tensors.
        owner: the function that made `obj`, if any. Out of the cells that it closes over itself, only
            tensors are lifted.
        borrowed: whether `obj` itself was made by somebody else, as a user's function is. Nothing is lifted
            out of a list, a dict or the attributes of a function then.

    Returns:
        The tensors; the rest as a template for `restore`, which is the object itself where there are
        none; and whether the closure is opaque, so that there may be tensors that are not among these.
    """
    if type(obj) is types.FunctionType:
        code = obj.__code__
        known = CODES.get(id(code))
        if known is None or known.probes:
            known = code_of(obj)
        if known.flat and not obj.__defaults__:
            # Most rules close over tensors and atoms alone, and need no walk.
            try:
                contents = [cell.cell_contents for cell in obj.__closure__ or ()]
            except ValueError:  # a name that is not bound yet
                contents = [_Walk]
            for content in contents:
                if not tensor_types[type(content)]:
                    break
            else:
                if not contents:
                    return contents, obj, False
                return contents, (code, obj.__globals__, known.cells, None), False
            if all([tensor_types[type(c)] or ATOMS[type(c)] or is_library_module(c) for c in contents]):
                return _lift_beside_atoms(obj, contents, tensor_types)
    shared = frozenset(map(id, _cells(owner, set())))
    state = frozenset(_assigned_cells(obj, tensor_types, set()))
    walk = _Walk(tensor_types, shared, state, borrowed=borrowed)
    template = walk.lift(obj)
    return walk.tensors, template, walk.opaque


def _lift_beside_atoms(
    function: types.FunctionType, contents: Sequence[Any], tensor_types: TypeSet
) -> "tuple[list[Any], types.FunctionType | _FlatFunction, bool]":
    tensors = [content for content in contents if tensor_types[type(content)]]
    if not tensors:
        return tensors, function, False
    pairs = zip(function.__closure__ or (), contents, strict=True)
    cells = [None if tensor_types[type(content)] else cell for cell, content in pairs]
    return tensors, (function.__code__, function.__globals__, len(tensors), cells), False


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
        content = content_of(cell)
        if callable(content):
            yield from _cells(content, seen)


def _assigned_cells(obj: Any, tensor_types: TypeSet, seen: set[int]) -> Iterator[int]:
    """The ids of the cells that a function, or one in its reach, assigns."""
    if id(obj) in seen:
        return
    seen.add(id(obj))
    if type(obj) is types.FunctionType:
        places = assigned_places(obj)
        parts: Sequence[Any] = (obj.__defaults__, obj.__kwdefaults__)
        for place, cell in enumerate(obj.__closure__ or ()):
            if place in places:
                yield id(cell)
            parts = (*parts, content_of(cell))
    else:
        parts = _parts(obj)[0] or ()
    for part in parts:
        kind = type(part)
        if not (tensor_types[kind] or ATOMS[kind]):  # which are most, and have no parts
            yield from _assigned_cells(part, tensor_types, seen)


class _Slot(int):
    """The place of one tensor among those that were lifted."""


class _Made(NamedTuple):
    """A container, partial or method that is made anew from its parts."""

    key: int
    make: Callable[[list[Any]], Any]
    parts: list[Any] | slice  # where all of them are tensors, as in most containers, their slots


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


_FlatFunction = tuple[types.CodeType, dict[str, Any], int, list[types.CellType | None] | None]


class _Recursion(NamedTuple):
    """A function that stands in its own closure."""

    key: int


class _Walk:
    """One walk through an object; `lift` returns its argument itself when it finds no tensor in it."""

    __slots__ = (
        "_borrowed",
        "_inner",
        "_known",
        "_open",
        "_shared",
        "_state",
        "_tensor_types",
        "_wrappers",
        "opaque",
        "tensors",
    )

    def __init__(
        self,
        tensor_types: TypeSet,
        shared: frozenset[int],
        state: frozenset[int],
        inner: bool = False,
        borrowed: bool = False,
    ) -> None:
        self.tensors: list[Any] = []
        self.opaque = False
        self._tensor_types = tensor_types
        self._shared = shared
        self._state = state
        self._inner = inner  # whether somebody else holds the object, who may use its attributes
        self._borrowed = borrowed
        # What an object was lifted to. One container or function in two places stays one.
        self._known: dict[int, Any] = {}
        # The containers that are being looked into.
        self._open: set[int] = set()
        # Frameworks' objects that were looked into: a function in one may know it.
        self._wrappers: set[int] = set()

    def lift(self, obj: Any) -> Any:
        kind = type(obj)
        if self._tensor_types[kind]:
            # One slot for each place: where a function runs again, one tensor may come back as two.
            self.tensors.append(obj)
            return _Slot(len(self.tensors) - 1)
        if ATOMS[kind]:
            return obj
        if isinstance(obj, types.ModuleType):
            self.opaque |= not is_library_module(obj)
            return obj
        if id(obj) in self._known:
            # A container that stands in itself is not made anew there.
            self.opaque |= id(obj) in self._open
            return self._known[id(obj)]
        if kind is types.FunctionType:
            self._known[id(obj)] = _Recursion(id(obj))  # for what it finds of itself in its closure
            lifted = self._function(obj)
        else:
            self._known[id(obj)] = obj
            self._open.add(id(obj))
            lifted = self._container(obj)
            self._open.discard(id(obj))
        self._known[id(obj)] = lifted
        return lifted

    def _container(self, obj: Any) -> Any:
        parts, make = _parts(obj)
        if parts is None:
            functions = functions_within(obj)
            if functions is None:
                # What the collector does not track has no reference to anything, unless it is made in C.
                self.opaque |= isinstance(obj, (tuple, contextvars.ContextVar)) or gc.is_tracked(obj)
            elif id(obj) not in self._wrappers:
                self._wrappers.add(id(obj))
                self.opaque |= not all(map(self._is_plain, functions))
            return obj
        lifted: list[Any] | slice | None = self._tensors_alone(parts)
        if lifted is None:
            lifted = [self.lift(part) for part in parts]
            if all(new is old for new, old in zip(lifted, parts, strict=True)):
                return obj
        if self._borrowed and isinstance(obj, (list, dict)):
            self.opaque = True
            return obj
        return _Made(id(obj), make, lifted)

    def _tensors_alone(self, parts: Sequence[Any]) -> slice | None:
        """Lift the parts, if all of them are tensors, and return their slots."""
        for part in parts:
            if not self._tensor_types[type(part)]:
                return None
        count = len(self.tensors)
        self.tensors.extend(parts)
        return slice(count, count + len(parts)) if parts else None

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        known = CODES.get(id(code))
        self.opaque |= (code_of(function) if known is None or known.probes else known).opaque
        cells: list[Any] = list(function.__closure__ or ())
        changed = recursive = False
        for place, cell in enumerate(cells):
            content = content_of(cell)
            if isinstance(content, types.ModuleType):
                self.opaque |= may_hold_by_module(content, code)
                continue
            if id(cell) in self._state or (
                id(cell) in self._shared and not self._tensor_types[type(content)]
            ):
                self.opaque |= not ATOMS[type(content)] and not self._is_plain(content)
                continue
            lifted = self.lift(content)
            if lifted is not content:
                cells[place] = lifted
                if type(lifted) is _Recursion and lifted.key == id(function):
                    recursive = True
                else:
                    changed = True
        extras = None
        # To look at `__dict__` makes one. The outermost function uses its own as a wrapper, or by its name.
        inner = self._inner or len(self._known) > 1
        own = function.__dict__ if inner or recursive or code.co_flags & inspect.CO_VARARGS else None
        if own or function.__defaults__ or function.__kwdefaults__:
            # A function has dicts of its own for these, which are made with it.
            old = [function.__defaults__, _items(function.__kwdefaults__), _items(own)]
            new = [self.lift(part) for part in old]
            changed |= any(a is not b for a, b in zip(new, old, strict=True))
            extras = [function.__name__, function.__qualname__, *new]
            if changed and self._borrowed and own and own.keys() != {"__wrapped__"}:
                self.opaque = True
                return function
        return _Function(id(function), function, cells, extras) if changed else function

    def _is_plain(self, content: Any) -> bool:
        """Whether no tensor can be reached through what is left where it stands."""
        walk = _Walk(self._tensor_types, _NO_CELLS, _NO_CELLS, inner=True)
        walk._wrappers = self._wrappers
        walk.lift(content)
        return not (walk.tensors or walk.opaque)


def _parts(obj: Any) -> tuple[Sequence[Any] | None, Callable[[list[Any]], Any]]:
    """The parts of a container, partial or method, and how it is made of them; None for another object."""
    kind = type(obj)
    if kind is tuple or kind is list:
        return obj, kind
    if kind is dict or kind is OrderedDict:
        return tuple(obj.values()), functools.partial(_mapping, kind, tuple(obj))
    if kind is functools.partial:
        parts = obj.func, obj.args, *obj.keywords.values()
        return parts, functools.partial(_partial, tuple(obj.keywords))
    if kind is types.MethodType:
        return (obj.__func__, obj.__self__), _method
    if isinstance(obj, tuple) and not getattr(obj, "__dict__", None):  # others hold more than their parts
        if all([ATOMS[type(part)] for part in obj]):
            return (), list  # such as a shape
        if make := getattr(kind, "_make", None):  # of a named tuple
            return obj, make
        if getattr(kind, "n_fields", None) == len(obj):  # of a framework's own in C, as of torch.max
            return obj, kind
        # Others may be made of anything.
    if isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, types.ModuleType):
        return (), list
    return None, list


def _items(mapping: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((mapping or {}).items())


def _mapping(kind: type, keys: tuple[Any, ...], values: list[Any]) -> Any:
    return kind(zip(keys, values, strict=True))


def _partial(keywords: tuple[str, ...], parts: list[Any]) -> Any:
    function, args, *values = parts
    return functools.partial(function, *args, **_mapping(dict, keywords, values))


def _method(parts: list[Any]) -> Any:
    return types.MethodType(*parts)


def restore(template: Any, tensors: Sequence[Any]) -> Any:
    """Build the object that `template` describes around `tensors`."""
    if type(template) is tuple:
        code, scope, count, old = template
        cells = tuple([types.CellType(tensor) for tensor in tensors[:count]])
        if old is not None:
            new = iter(cells)
            cells = tuple([next(new) if cell is None else cell for cell in old])
        return types.FunctionType(code, scope, None, None, cells)
    return _build(template, tensors, {})


def _build(template: Any, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return tensors[template]
    if kind is _Recursion:
        return made[template.key]
    if kind is _Function or kind is _Made:
        if template.key not in made:
            build = _build_function if kind is _Function else _build_container
            made[template.key] = build(template, tensors, made)
        return made[template.key]
    return template


def _build_container(template: _Made, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
    parts = template.parts
    if type(parts) is slice:
        return template.make(list(tensors[parts]))
    return template.make([_build(part, tensors, made) for part in parts])


def _build_function(template: _Function, tensors: Sequence[Any], made: dict[int, Any]) -> types.FunctionType:
    parts = template.cells
    cells = tuple([part if type(part) is types.CellType else types.CellType() for part in parts])
    function = types.FunctionType(template.code, template.globals, None, None, cells)
    made[template.key] = function  # before its cells are filled: it may stand in one of them
    for cell, part in zip(cells, parts, strict=True):
        if cell is not part:
            cell.cell_contents = _build(part, tensors, made)
    if template.extras:
        function.__name__, function.__qualname__, defaults, keyword_defaults, own = template.extras
        function.__defaults__ = _build(defaults, tensors, made)
        function.__kwdefaults__ = dict(_build(keyword_defaults, tensors, made))
        function.__dict__.update(_build(own, tensors, made))
    return function
