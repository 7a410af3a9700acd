"""`op_custom_gradient`, and one call of an op told from top to bottom."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast, overload

from multigrad import backend
from multigrad.binding import Binding, Signature, name_of, signature_of
from multigrad.errors import describe, message
from multigrad.leaves import Layout, split
from multigrad.rule import Form, Pullback, form_of

P = ParamSpec("P")
R = TypeVar("R")


@overload
def op_custom_gradient(
    f: Callable[P, tuple[R, Any]], *, name: str | None = None, forward_mode: bool = False
) -> Callable[P, R]: ...


@overload
def op_custom_gradient(
    f: None = None, *, name: str | None = None, forward_mode: bool = False
) -> Callable[[Callable[P, tuple[R, Any]]], Callable[P, R]]: ...


def op_custom_gradient(
    f: Callable[..., Any] | None = None, *, name: str | None = None, forward_mode: bool = False
) -> Callable[..., Any]:
    """DOC"""
    if f is None:
        return functools.partial(op_custom_gradient, name=name, forward_mode=forward_mode)
    if not callable(f):
        raise TypeError(
            message(
                "op_custom_gradient",
                "there is nothing to decorate",
                required="a function that returns `output, grad`",
                got=describe(f),
                mend="write @op_custom_gradient above the function",
            )
        )
    title = name or name_of(f)
    signature = signature_of(f)

    def op(*args: Any, **kwargs: Any) -> Any:
        return _call(title, f, signature, forward_mode, args, kwargs)

    return functools.update_wrapper(op, f)


def _call(
    name: str,
    f: Callable[..., Any],
    signature: Signature,
    forward_mode: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    try:
        values, binding = signature.bind(args, kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
    tensors, arguments = split(values)
    forward = Forward(name, f, binding, arguments, forward_mode)
    outputs = backend.active.apply(forward, tensors)
    return forward.output.join(outputs)


class Forward:
    """The function of one call, as a backend runs it: flat tensors to flat tensors and a pullback."""

    __slots__ = ("arguments", "binding", "f", "forward_mode", "name", "output")

    def __init__(
        self, name: str, f: Callable[..., Any], binding: Binding, arguments: Layout, forward_mode: bool
    ) -> None:
        self.name = name
        self.f = f
        self.binding = binding
        self.arguments = arguments
        self.forward_mode = forward_mode
        self.output: Layout  # known once the function ran

    def __call__(
        self, tensors: Sequence[Any], function: Callable[..., Any] | None = None
    ) -> tuple[list[Any], Callable[..., Any], Pullback]:
        """Run the function on `tensors`; `function` stands in for it where its closure was lifted."""
        values = self.arguments.join(tensors)
        output, rule = self._pair(self.binding.call(function or self.f, values))
        outputs, self.output = split(output)
        form = form_of(self.name, rule, self.binding, len(outputs))
        if form is Form.HYBRID:
            rule = functools.partial(rule, *values[: self.binding.given])
        framework = backend.active
        specs = tuple([framework.spec(t) if framework.is_differentiable(t) else None for t in tensors])
        pullback = Pullback(self.name, form, self.arguments, self.binding, self.output, specs)
        return outputs, rule, pullback

    def _pair(self, returned: Any) -> tuple[Any, Callable[..., Any]]:
        if isinstance(returned, (tuple, list)) and len(returned) == 2 and callable(returned[1]):
            return returned[0], returned[1]
        raise TypeError(
            message(
                self.name,
                "the function did not return an output and its gradient's rule",
                required="a pair `output, grad`, whose second item is a function",
                got=describe(returned),
                mend="end the function with `return output, grad`",
            )
        )
