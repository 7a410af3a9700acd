"""Whether a function may reach a Keras Variable, said before it runs.

A framework that must know the inputs of an op before it runs it asks here. The answer looks at the
function's closure, and at the globals that it and the functions it calls use. It is no where nothing was
found that could lead to a variable; anything unknown is a yes.
"""

import contextvars
import functools
import gc
import types
from collections import namedtuple
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

from multigrad import backend
from multigrad.behind import captured_by
from multigrad.kinds import ATOMS
from multigrad.namespaces import MISSING, Probe, imported, is_library, names_in, operands

_TENSORS = backend.active.TENSORS


class _Names(NamedTuple):
    """What was found behind the names that a function, and those that it calls, use."""

    code: types.CodeType  # kept alive, so that its id stays its own
    scope: dict[str, Any]  # one code may have been run in several namespaces
    reached: bool
    probes: list[Probe]

    def still_hold_for(self, function: types.FunctionType) -> bool:
        """Whether it would be found again."""
        return self.scope is function.__globals__ and all(
            [namespace.get(name, MISSING) is value for namespace, name, value in self.probes]
        )


_KNOWN: dict[int, _Names] = {}
_KEPT = 4096


def may_reach(obj: Any) -> bool:
    """Whether a variable may be reached through `obj`, usually a function.

    ```python
    from keras import ops, random
    from multigrad.reach import may_reach

    seed = random.SeedGenerator(1)
    assert not may_reach(lambda x: ops.exp(x))
    assert may_reach(lambda x, seed=seed: x + random.normal(x.shape, seed=seed))
    ```
    """
    if type(obj) is not types.FunctionType:
        return _Search().reaches(obj)
    known = _KNOWN.get(id(obj.__code__))
    if known is None or not known.still_hold_for(obj):
        search = _Search()
        reached = search.reaches_by_name(obj)
        if len(_KNOWN) >= _KEPT:
            _KNOWN.clear()
        known = _KNOWN[id(obj.__code__)] = _Names(obj.__code__, obj.__globals__, reached, search.probes)
    captures = obj.__closure__ or obj.__defaults__ or obj.__kwdefaults__
    return known.reached or (captures is not None and _Search().reaches_by_capture(obj))


class _Search:
    """One search, in which a thing that comes a second time adds nothing."""

    def __init__(self) -> None:
        self.probes: list[Probe] = []
        self._seen: set[int] = set()

    def reaches(self, obj: Any, attributes: Set[str] = frozenset()) -> bool:
        """Whether a variable may be reached through `obj`; of a module, only through such attributes."""
        kind = type(obj)
        if kind is types.ModuleType:
            return not is_library(obj.__name__) and self._through_module(obj, attributes)
        if _TENSORS[kind] or ATOMS[kind] or id(obj) in self._seen:
            return False
        self._seen.add(id(obj))
        if kind is types.FunctionType:
            names = attributes | names_in(obj.__code__)
            own = self._through_namespace(vars(obj), names, names)
            return own or self.reaches_by_name(obj) or self.reaches_by_capture(obj)
        parts = _class_parts(obj) if isinstance(obj, type) else _parts(obj)
        if parts is not None:
            return any(map(self.reaches, parts))
        return isinstance(obj, contextvars.ContextVar) or gc.is_tracked(obj)  # as in `may_hold`

    def reaches_by_capture(self, function: types.FunctionType) -> bool:
        """Whether it is through what a function closes over, and its defaults."""
        parts = [part for part in captured_by(function) if part is not None]
        if not parts:
            return False
        attributes = names_in(function.__code__)
        return any([self.reaches(part, attributes) for part in parts])

    def reaches_by_name(self, function: types.FunctionType) -> bool:
        """Whether it is through the globals that a function uses."""
        namespace, code = function.__globals__, function.__code__
        if is_library(namespace.get("__name__", "")):
            return False
        if not all(map(is_library, imported(code, namespace))):
            return True
        return self._through_namespace(namespace, names_in(code), operands(code, "LOAD_GLOBAL", "LOAD_NAME"))

    def _through_module(self, module: types.ModuleType, attributes: Set[str]) -> bool:
        if id(module) in self._seen:
            return False
        self._seen.add(id(module))
        return self._through_namespace(vars(module), attributes, attributes)

    def _through_namespace(
        self, namespace: dict[str, Any], attributes: Set[str], names: Iterable[str]
    ) -> bool:
        for name in names:
            value = namespace.get(name, MISSING)
            self.probes.append((namespace, name, value))
            if value is MISSING:
                continue
            # A global container may hold a layer tomorrow.
            if isinstance(value, (dict, list, set)) or self.reaches(value, attributes):
                return True
        return False


def _class_parts(cls: type) -> Iterable[Any]:
    own = [base for base in cls.__mro__ if not is_library(base.__module__)]
    return [part for base in own for part in vars(base).values()]


def _parts(obj: Any) -> Iterable[Any] | None:
    """What an object consists of, None for one of an unknown class."""
    if isinstance(obj, (tuple, list, set, frozenset)):
        return obj
    if isinstance(obj, dict):
        return obj.values()
    if isinstance(obj, functools.partial):
        return obj.func, obj.args, obj.keywords
    if isinstance(obj, types.MethodType):
        return obj.__func__, obj.__self__
    if isinstance(obj, property):
        return obj.fget, obj.fset, obj.fdel
    if isinstance(obj, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return (obj.__self__,)
    if isinstance(obj, _DESCRIPTORS):
        return ()
    if is_library(type(obj).__module__) and hasattr(obj, "__wrapped__"):
        return (obj.__wrapped__,)  # a function behind jax.jit or functools.cache, say
    return None


_DESCRIPTORS = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, type(vars(namedtuple("_", "field"))["field"]),
)  # fmt: skip
