"""Arguments to parameters: what a call's arguments are, in order and by name."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multigrad import backend
from multigrad.core.errors import OpError, message
from multigrad.core.type_sets import HoldsNoTensor

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEPT = 4096


@dataclass(slots=True, frozen=True)
class Binding:
    """Which parameters the arguments of one call went to; it holds none of the arguments.

    Of `count` arguments, in the order of the signature and those of `*args` and `**kwargs` one by one,
    the last `len(keywords)` are passed by keyword. The first `given` are positional, up to the last that
    came from the caller; positional ones behind them are defaults.
    """

    signature: "Signature"
    count: int
    given: int
    keywords: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """How messages call the arguments: `'x'`, and `'xs'[1]` for what came in through `*xs`."""
        positional, variadic = self.signature.positional, self.signature.variadic
        count = self.count - len(self.keywords)
        names = [repr(name) for name in positional[:count]]
        names += [f"{variadic!r}[{i}]" for i in range(count - len(names))]
        return names + [repr(name) for name in self.keywords]

    @property
    def variadic(self) -> str | None:
        """The name of `*args`, None without one."""
        return self.signature.variadic

    @property
    def positional(self) -> int:
        """How many of the arguments are positional."""
        return self.count - len(self.keywords)

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call `function` with `values` as they were bound."""
        if not self.keywords:
            return function(*values)
        count = self.count - len(self.keywords)
        return function(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))


class Signature(HoldsNoTensor):
    """The parameters of a function, read once.

    ```python
    values, binding = Signature(lambda x, axis=-1: ...).bind((2.0,), {})
    assert values == (2.0, -1) and binding.names() == ["'x'", "'axis'"]
    ```
    """

    __slots__ = ("full", "inspected", "positional", "variadic")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.inspected = inspect.signature(function)
        parameters = self.inspected.parameters.values()
        self.positional = [p.name for p in parameters if p.kind in POSITIONAL]
        self.variadic = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        # Where nothing but these positional parameters can come, a full tuple needs no binding.
        plain = len(self.positional) == len(parameters)
        self.full = Binding(self, len(parameters), len(parameters)) if plain else None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Binding]:
        """Bind a call's arguments, defaults applied.

        Raises:
            TypeError: for an argument that is missing or too much, in Python's own words.
        """
        if self.full is not None and len(args) == self.full.count and not kwargs:
            return args, self.full
        bound = self.inspected.bind(*args, **kwargs)
        positional = [place for place, name in enumerate(self.positional) if name in bound.arguments]
        given = max(len(args), positional[-1] + 1 if positional else 0)
        bound.apply_defaults()
        values = bound.args + tuple(bound.kwargs.values())
        return values, Binding(self, len(values), given, tuple(bound.kwargs))

    def misfit(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError) -> OpError:
        """Return the error for arguments that `bind` cannot bind, with Python's own reason."""
        parameters = [p.replace(annotation=p.empty) for p in self.inspected.parameters.values()]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        fix = "pass a value for each parameter that has no default, and no others"
        if by_name and self.variadic is None and len(args) > len(self.positional):
            fix = f"pass {' or '.join(map(repr, by_name))} by name, as in {by_name[0]}=..."
        keywords = f", and {', '.join(map(repr, kwargs))} by name" if kwargs else ""
        signature = inspect.Signature(parameters)
        return OpError(
            message(
                op,
                str(error),
                required=f"arguments for {signature}",
                got=f"{len(args)} by position{keywords}",
                fix=fix,
            )
        )


_SIGNATURES: dict[types.CodeType, Signature] = {}


def signature_of(function: Callable[..., Any]) -> Signature:
    """The `Signature` of `function`, read once per code for an op that is defined anew in every call."""
    if (
        type(function) is not types.FunctionType
        or function.__dict__  # may hold __wrapped__ or __signature__
        or function.__defaults__  # belong to the function, not to its code
        or (function.__code__.co_kwonlyargcount and function.__kwdefaults__)
    ):
        return Signature(function)
    return _signature_of_code(function.__code__)


@backend.active.constant
def _signature_of_code(code: types.CodeType) -> Signature:
    """The signature of every function that has this code and no defaults."""
    found = _SIGNATURES.get(code)
    if found is None:
        if len(_SIGNATURES) >= _KEPT:
            _SIGNATURES.clear()
        cells = tuple([types.CellType() for _ in code.co_freevars])
        _SIGNATURES[code] = found = Signature(types.FunctionType(code, {}, None, None, cells))
    return found


def name_of(function: Any) -> str:
    """How messages call `function`, which may be a partial or an object with `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2].replace("<lambda>", "lambda")
