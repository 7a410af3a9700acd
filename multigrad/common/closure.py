"""Lift the tensors out of a function's closure, and put them back.

A rule is a closure, and a framework must see its tensors as residuals. `lift` finds the tensors in a
function's cells and defaults, and in the plain containers, partials, methods and functions there. It returns
them with a template, from which `restore` makes an equal function with other tensors.

Some objects are shared with other code and not copied: cells that are assigned (`nonlocal`), containers and
functions in the cells of the enclosing function (`owner`), and objects of any other class. A closure is
opaque if one of these may hold a tensor.
"""

import collections
import functools
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from multigrad.common.reachable import assigned_cells, content_of, may_hold_tensors, wrapped_functions
from multigrad.common.type_sets import ATOMS, Transparent, TypeSet

Build = Callable[[Sequence[Any], dict[int, Any]], Any]
"""Makes a copy of an object with other tensors. The dict holds the copies made so far, by the ids of their
originals."""


def lift(obj: Any, tensor_types: TypeSet, owner: Any = None) -> tuple[list[Any], Any, bool]:
    """Return the tensors in a function, a template for `restore`, and whether the closure is opaque.

    The template is the function itself if it has no tensors.

    Arguments:
        obj: a function, partial, bound method or another callable.
        tensor_types: the types that count as tensors.
        owner: the function that returned `obj`. Containers and functions in its cells are not copied.
    """
    if type(obj) is types.FunctionType and _has_only_cells(obj):
        cells = obj.__closure__ or ()
        tensors: list[Any] = []
        others: list[Any] = []  # the cells without a tensor, and None for the others
        opaque = False
        for cell in cells:
            content = content_of(cell)
            kind = type(content)
            if tensor_types[kind]:
                tensors.append(content)
                others.append(None)
            elif ATOMS[kind] or kind is types.ModuleType:
                others.append(cell)
            elif _is_opaque_object(content):  # `self` of a method
                others.append(cell)
                opaque = True
            else:
                break
        else:
            return tensors, (obj.__code__, obj.__globals__, others) if tensors else obj, opaque
    walk = _Walk(tensor_types, frozenset(_cells_of(owner)), frozenset(_assigned_cell_ids(obj, set())))
    build = walk.builder(obj)
    return walk.tensors, obj if build is None else build, walk.opaque


def restore(template: Any, tensors: Sequence[Any]) -> Any:
    """Return a copy of the lifted object with the first of these tensors."""
    if type(template) is tuple:
        code, module_globals, others = template
        new = iter(tensors)
        cells = tuple([types.CellType(next(new)) if cell is None else cell for cell in others])
        return types.FunctionType(code, module_globals, None, None, cells)
    return template(tensors, {}) if type(template) is _Template else template


OTHER = -1
"""The role of a residual that is neither an input nor an output."""


def classify(residuals: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> list[int]:
    """Return the role of each residual: an index among the inputs followed by the outputs, or `OTHER`.

    An output that is an input counts as the input.
    """
    if not residuals:
        return []
    roles: dict[int, int] = {}
    for role, tensor in enumerate(inputs):
        roles.setdefault(id(tensor), role)
    for role, tensor in enumerate(outputs, len(inputs)):
        roles.setdefault(id(tensor), role)
    return [roles.get(id(residual), OTHER) for residual in residuals]


def residuals_in(roles: Sequence[int], tensors: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """Return the residuals with these roles among `tensors`, the inputs and outputs, and the others."""
    remaining = iter(others)
    return [next(remaining) if role == OTHER else tensors[role] for role in roles]


_STRUCTURED = TypeSet(
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType,
    types.ModuleType, type, functools.partial,
    tuple, list, dict, set, frozenset, collections.deque, types.MappingProxyType,
)  # fmt: skip
"""Types whose objects hold a tensor only if one of their parts does. All other objects are opaque."""


def _is_opaque_object(obj: Any) -> Any:
    """Return whether an object is certainly opaque, without looking at its attributes."""
    kind = type(obj)
    attributes = getattr(obj, "__dict__", {})
    return attributes and not (ATOMS[kind] or _STRUCTURED[kind]) and "__wrapped__" not in attributes


def _has_only_cells(function: types.FunctionType) -> bool:
    """Return whether a function holds objects only in cells that are not assigned, as most rules do."""
    code = function.__code__
    more = function.__defaults__ or code.co_kwonlyargcount or code.co_flags & inspect.CO_VARARGS
    return not (more or (function.__closure__ and assigned_cells(code)))


class _Template:
    """A `Build` that makes one copy of its object, also if the object occurs several times."""

    __slots__ = ("build", "key")

    def __init__(self, key: int, build: Build) -> None:
        self.key, self.build = key, build

    def __call__(self, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        if self.key not in made:
            made[self.key] = self.build(tensors, made)
        return made[self.key]


class _Itself:
    """The `Build` of a function that occurs in its own closure."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __call__(self, tensors: Sequence[Any], made: dict[int, Any]) -> Any:
        return made[self.key]


_IN_PROGRESS = object()


class _Walk:
    """Walks through an object and collects its tensors."""

    __slots__ = ("_assigned", "_builders", "_objects", "_of_owner", "_tensor_types", "opaque", "tensors")

    def __init__(self, tensor_types: TypeSet, of_owner: frozenset[int], assigned: frozenset[int]) -> None:
        self.tensors: list[Any] = []
        self.opaque = False
        self._tensor_types, self._of_owner, self._assigned = tensor_types, of_owner, assigned
        self._builders: dict[int, Any] = {}  # by id, so that an object that occurs twice is copied once
        self._objects: list[Any] = []  # kept alive: another object could get the id of one that is freed

    def builder(self, obj: Any) -> Any:
        """Return the `Build` of an object, None if the object is not copied."""
        kind = type(obj)
        if self._tensor_types[kind]:
            # A tensor that occurs twice has two slots: when a function runs again, they may differ.
            slot = len(self.tensors)
            self.tensors.append(obj)
            return lambda tensors, made: tensors[slot]
        if ATOMS[kind]:
            return None
        key = id(obj)
        if key in self._builders:
            if self._builders[key] is not _IN_PROGRESS:
                return self._builders[key]
            if kind is types.FunctionType:
                return _Itself(key)
            self.opaque = True  # a container that holds itself
            return None
        self._builders[key] = _IN_PROGRESS
        self._objects.append(obj)
        build = self._function(obj) if kind is types.FunctionType else self._container(obj)
        self._builders[key] = template = None if build is None else _Template(key, build)
        return template

    def _skip(self, obj: Any) -> None:
        """Do not copy an object. Note whether it may hold a tensor."""
        if self._tensor_types[type(obj)]:
            self.opaque = True
            return
        for part in wrapped_functions(obj) or [obj]:
            if type(part) is types.FunctionType:
                inner = _Walk(self._tensor_types, frozenset(), frozenset())
                inner._builders = dict.fromkeys(self._builders)
                inner.builder(part)
                self.opaque |= bool(inner.tensors) or inner.opaque
            else:
                self.opaque |= may_hold_tensors(part)

    def _container(self, obj: Any) -> Build | None:
        parts, make = (_attributes_of if isinstance(obj, Transparent) else _parts_and_maker)(obj)
        if parts is None:
            self._skip(obj)
            return None
        start = len(self.tensors)
        if parts and all([self._tensor_types[type(part)] for part in parts]):
            self.tensors += parts
            end = len(self.tensors)

            def build(tensors: Sequence[Any], made: dict[int, Any]) -> Any:
                return make(list(tensors[start:end]))
        else:
            builds = [self.builder(part) for part in parts]
            if not any(builds):
                return None
            kept = [part if build is None else None for part, build in zip(parts, builds, strict=True)]

            def build(tensors: Sequence[Any], made: dict[int, Any]) -> Any:
                return make(_build_all(kept, builds, tensors, made))

        return build

    def _function(self, function: types.FunctionType) -> Build | None:
        cells = function.__closure__ or ()
        builds: list[Any] = []
        for cell in cells:
            content = content_of(cell)
            of_owner = id(cell) in self._of_owner and not self._tensor_types[type(content)]
            if of_owner or id(cell) in self._assigned:
                self._skip(content)
                builds.append(None)
            else:
                builds.append(self.builder(content))
        key = id(function)
        names_itself = any([type(build) is _Itself and build.key == key for build in builds])
        # The outermost function may read its own attributes if it is a wrapper or closes over itself.
        may_read = names_itself or len(self._builders) > 1 or function.__code__.co_flags & inspect.CO_VARARGS
        attributes = vars(function) if may_read else {}
        extras = [function.__defaults__, _items(function.__kwdefaults__), _items(attributes)]
        of_extras = [self.builder(part) for part in extras]
        if all([b is None or (type(b) is _Itself and b.key == key) for b in (*builds, *of_extras)]):
            return None
        code, module_globals, name = function.__code__, function.__globals__, function.__name__
        kept = [cell if build is None else None for cell, build in zip(cells, builds, strict=True)]
        extras = [part if build is None else None for part, build in zip(extras, of_extras, strict=True)]

        def build(tensors: Sequence[Any], made: dict[int, Any]) -> types.FunctionType:
            new = tuple([types.CellType() if cell is None else cell for cell in kept])
            made[key] = copy = types.FunctionType(code, module_globals, name, None, new)
            for cell, part in zip(new, builds, strict=True):
                if part is not None:  # set after the copy exists, because it may occur in its own cells
                    cell.cell_contents = part(tensors, made)
            defaults, keyword_defaults, copied_attributes = _build_all(extras, of_extras, tensors, made)
            copy.__defaults__ = defaults
            copy.__kwdefaults__ = dict(keyword_defaults) if keyword_defaults else None
            copy.__dict__.update(copied_attributes or ())
            return copy

        return build


def _build_all(
    parts: Sequence[Any], builds: Sequence[Any], tensors: Sequence[Any], made: dict[int, Any]
) -> list[Any]:
    pairs = zip(parts, builds, strict=True)
    return [part if build is None else build(tensors, made) for part, build in pairs]


def _items(mapping: Any) -> tuple[Any, ...] | None:
    return tuple(mapping.items()) if mapping else None


def _cells_of(owner: Any) -> Iterator[int]:
    """Yield the ids of the cells of a function, and of the functions in these cells."""
    waiting, seen = [owner], set()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", getattr(function, "func", function))
        if type(function) is types.FunctionType and id(function) not in seen:
            seen.add(id(function))
            yield from map(id, function.__closure__ or ())
            waiting += map(content_of, function.__closure__ or ())


def _assigned_cell_ids(obj: Any, seen: set[int]) -> Iterator[int]:
    """Yield the ids of the cells that are assigned by a function or by the functions in its closure."""
    if id(obj) in seen:
        return
    if type(obj) is types.FunctionType:
        seen.add(id(obj))
        assigned = assigned_cells(obj.__code__)
        for index, cell in enumerate(obj.__closure__ or ()):
            if index in assigned:
                yield id(cell)
            yield from _assigned_cell_ids(content_of(cell), seen)
    elif type(obj) in _CONTAINERS:
        seen.add(id(obj))
        for part in _parts_and_maker(obj)[0] or ():
            if type(part) is types.FunctionType or type(part) in _CONTAINERS:  # most parts are tensors
                yield from _assigned_cell_ids(part, seen)


_CONTAINERS = frozenset({tuple, list, dict, functools.partial})


def _parts_and_maker(obj: Any) -> tuple[Sequence[Any] | None, Callable[[list[Any]], Any]]:
    """Return the parts of a container, partial or method, and a function that makes it from other parts.

    The parts are None for other objects.
    """
    kind = type(obj)
    if kind is tuple or kind is list:
        return tuple(obj), kind
    if kind is dict or kind is OrderedDict:
        keys = tuple(obj)
        return tuple(obj.values()), lambda values: kind(zip(keys, values, strict=True))
    if kind is functools.partial:
        names = tuple(obj.keywords)
        return (obj.func, obj.args, *obj.keywords.values()), lambda parts: functools.partial(
            parts[0], *parts[1], **dict(zip(names, parts[2:], strict=True))
        )
    if kind is types.MethodType:
        return (obj.__func__, obj.__self__), lambda parts: types.MethodType(*parts)
    if isinstance(obj, tuple) and not getattr(obj, "__dict__", None):
        if all([ATOMS[type(part)] for part in obj]):
            return (), list  # for example a shape
        if make := getattr(kind, "_make", None):  # a named tuple
            return obj, make
        if getattr(kind, "n_fields", None) == len(obj):  # a struct sequence, such as torch.max returns
            return obj, kind
    if isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, types.ModuleType):
        return (), list
    return None, list


def _attributes_of(obj: Transparent) -> tuple[Sequence[Any], Callable[[list[Any]], Any]]:
    """Return the attributes of an object, and a function that makes a copy from other attributes."""

    def make(values: list[Any]) -> Any:
        made = object.__new__(type(obj))
        vars(made).update(zip(vars(obj), values, strict=True))
        return made

    return tuple(vars(obj).values()), make
