"""Bind the arguments of a call to the parameters of a function."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multigrad import backend
from multigrad.common.errors import OpError, did_you_mean, message
from multigrad.common.type_sets import HoldsNoTensor
from multigrad.core.structure import Layout

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(slots=True, frozen=True)
class Binding:
    """The parameters to which the arguments of one call are bound. It does not hold the arguments.

    The arguments are in the order of the signature, with one for each item of `*args` and `**kwargs`.
    """

    signature: "Signature"
    count: int
    """How many arguments there are, with defaults."""
    passed: int
    """How many positional arguments there are up to the last one that the caller passed. The positional
    arguments after these are defaults."""
    keywords: tuple[str, ...] = ()
    """The names of the last arguments, which are passed by keyword."""

    def names(self) -> list[str]:
        """Return the names of the arguments in messages: `'x'`, or `'xs'[1]` for an item of `*xs`."""
        positional, variadic = self.signature.positional, self.signature.variadic
        count = self.count - len(self.keywords)
        names = [repr(name) for name in positional[:count]]
        names += [f"{variadic!r}[{i}]" for i in range(count - len(names))]
        return names + [repr(name) for name in self.keywords]

    @property
    def variadic(self) -> str | None:
        """The name of the parameter `*args`, None if there is none."""
        return self.signature.variadic

    @property
    def positional(self) -> int:
        """How many of the arguments are positional."""
        return self.count - len(self.keywords)

    def call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Call `function` with `values` for the arguments."""
        if not self.keywords:
            return function(*values)
        count = self.count - len(self.keywords)
        return function(*values[:count], **dict(zip(self.keywords, values[count:], strict=True)))


class Arguments(HoldsNoTensor):
    """The arguments of one call of an op, or the variables that it read, without their tensors.

    Arguments:
        name: the name of the op in messages.
        binding: the binding of the arguments, or the variables.
        layout: the layout of the arguments.
    """

    __slots__ = ("binding", "is_flat", "layout", "name")

    def __init__(self, name: str, binding: Any, layout: Layout) -> None:
        self.name, self.binding, self.layout = name, binding, layout
        self.is_flat = layout.is_flat and not binding.keywords
        """Whether the tensors are the arguments of the function."""

    def call(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """Call a function with the arguments, made from these tensors."""
        return self.binding.call(function, self.layout.join(tensors))

    def named(self) -> list[tuple[str, Any]]:
        """Return the name and the template of each argument."""
        return list(zip(self.binding.names(), self.layout.template, strict=True))


class Signature(HoldsNoTensor):
    """The parameters of a function.

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
        # If all parameters are positional, a call that passes each of them by position needs no binding.
        all_positional = len(self.positional) == len(parameters)
        self.full = Binding(self, len(parameters), len(parameters)) if all_positional else None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Binding]:
        """Return the values of all arguments, with defaults, and their binding.

        Raises:
            TypeError: with Python's message, if the arguments do not fit the parameters.
        """
        if self.full is not None and len(args) == self.full.count and not kwargs:
            return args, self.full
        bound = self.inspected.bind(*args, **kwargs)
        positional = [index for index, name in enumerate(self.positional) if name in bound.arguments]
        passed = max(len(args), positional[-1] + 1 if positional else 0)
        bound.apply_defaults()
        values = bound.args + tuple(bound.kwargs.values())
        return values, Binding(self, len(values), passed, tuple(bound.kwargs))

    def binding_error(
        self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError
    ) -> OpError:
        """Return the error for arguments that `bind` cannot bind, with Python's reason."""
        parameters = [p.replace(annotation=p.empty) for p in self.inspected.parameters.values()]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        fix = "pass a value for each parameter that has no default, and no others"
        if by_name and self.variadic is None and len(args) > len(self.positional):
            fix = f"pass {' or '.join(map(repr, by_name))} by name, as in {by_name[0]}=..."
        names = self.inspected.parameters
        fix += next(filter(None, [did_you_mean(name, names) for name in kwargs if name not in names]), "")
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


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return the signature of `function`, cached by its code if possible.

    An op may be defined again in every call of another function.
    """
    if (
        type(function) is not types.FunctionType
        or function.__dict__  # may hold __wrapped__ or __signature__
        or function.__defaults__  # may differ between functions with the same code
        or (function.__code__.co_kwonlyargcount and function.__kwdefaults__)
    ):
        return Signature(function)
    return _signature_of_code(function.__code__)


@backend.active.constant
def _signature_of_code(code: types.CodeType) -> Signature:
    """Return the signature of every function that has this code and no defaults."""
    return _cached_signature(code)


@functools.lru_cache(4096)
def _cached_signature(code: types.CodeType) -> Signature:
    cells = tuple([types.CellType() for _ in code.co_freevars])
    return Signature(types.FunctionType(code, {}, None, None, cells))


def name_of(function: Any) -> str:
    """Return the name of a function, partial or callable object in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)  # ufuncs have one
    name = name or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2].replace("<lambda>", "lambda")
