"""The names that the code of a function uses, and what stands behind them in a namespace."""

import dis
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

MISSING = object()
"""What stands where nothing does."""

Probe = tuple[Any, str, Any]
"""A namespace, a name, and what stood there. Whether it still does is asked in every call of an op, and so
without a function for it."""


def code_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of the functions that are defined within."""
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def operands(code: types.CodeType, *instructions: str) -> Iterator[str]:
    """The names in such instructions of a code object, and of those within it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in instructions:
            yield instruction.argval
    for inner in code_within(code):
        yield from operands(inner, *instructions)


def imported(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[str]:
    """The modules that a code object, or one within it, imports, by their full names."""
    loaded: list[Any] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, name = loaded[-2], instruction.argval
            package = scope.get("__package__") or scope.get("__name__", "").rpartition(".")[0]
            yield importlib.util.resolve_name("." * level + name, package) if level and package else name
        if instruction.opname != "EXTENDED_ARG":
            loaded.append(instruction.argval)
    for inner in code_within(code):
        yield from imported(inner, scope)


def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals (and of attributes) that a code object uses, by `getattr` too."""
    names = frozenset(code.co_names).union(*map(names_in, code_within(code)))
    return names.union(filter(str.isidentifier, _texts(code))) if "getattr" in names else names


def _texts(code: types.CodeType) -> Iterator[str]:
    return (constant for constant in code.co_consts if isinstance(constant, str))


_LIBRARIES = frozenset({"jax", "jaxlib", "keras", "multigrad", "numpy", "tensorflow", "torch"})


def is_library(module: str) -> bool:
    """Whether a module, by its name, is one in which no tensor and no variable of a user stands."""
    return is_of_framework(module) or module.partition(".")[0] in sys.stdlib_module_names


def is_library_module(value: Any) -> bool:
    """Whether it is such a module itself."""
    return isinstance(value, types.ModuleType) and is_library(value.__name__)


def is_of_framework(module: str) -> bool:
    """Whether it is one of Keras's, of its backends' or of this library's own."""
    return module.partition(".")[0] in _LIBRARIES
