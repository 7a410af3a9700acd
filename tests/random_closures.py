"""Random closures for the tests of lifting: functions and containers that hold tensors in every way.

The functions have no parameters without defaults. `value_of` evaluates an object to plain values.
"""

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Triple = namedtuple("Triple", "a b c")


class Tensor:
    """Stands for a tensor. Its value is a number of at least 1000, as no other number here."""

    def __init__(self, value: int) -> None:
        self.value = value


def value_of(obj: Any) -> Any:
    """Return an object with the value of each tensor, and with the results of each function."""
    if isinstance(obj, Tensor):
        return obj.value
    if callable(obj):
        return value_of(obj())
    if isinstance(obj, Mapping):
        return {key: value_of(item) for key, item in obj.items()}
    return list(map(value_of, obj)) if isinstance(obj, (list, tuple)) else obj


def negated(value: Any) -> Any:
    """Return a result of `value_of` with the values of the tensors negated."""
    if isinstance(value, dict):
        return {key: negated(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(negated, value))
    return -value if isinstance(value, int) and value >= 1000 else value


def _in_a_cell(a: Any, b: Any) -> Callable[..., Any]:
    return lambda: [a, b]


def _in_a_default(a: Any, b: Any) -> Callable[..., Any]:
    return lambda held=a, number=2: [held, number, b]


def _in_a_keyword(a: Any, b: Any) -> Callable[..., Any]:
    return lambda *, held=a: held


def _in_keywords(a: Any, b: Any) -> Callable[..., Any]:
    return lambda *, held=a, number=1, other=b: [held, number, other]


def _in_an_attribute(a: Any, b: Any) -> Callable[..., Any]:
    def read() -> Any:
        return [vars(read)["held"], vars(read)["number"]]

    vars(read).update(held=a, number=2)
    return read


class _Plain:
    def both(self, a: Any, b: Any) -> Any:
        return [a, b]


def _in_a_partial_method(a: Any, b: Any) -> Callable[..., Any]:
    return functools.partial(_Plain().both, a, b)


def _in_a_recursion(a: Any, b: Any) -> Callable[..., Any]:
    def call(n: int = 2) -> Any:
        return [a, b] if n == 0 else call(n - 1)

    return call


def _in_a_wrapper(a: Any, b: Any) -> Callable[..., Any]:
    @functools.wraps(_in_a_cell(a, b))
    def call(*args: Any, **kwargs: Any) -> Any:
        return [a, *args, call.__wrapped__()]

    return call


def _in_an_inner_function(a: Any, b: Any) -> Callable[..., Any]:
    return lambda: (lambda: a)()


def _in_a_partial(a: Any, b: Any) -> Callable[..., Any]:
    return functools.partial(lambda x, *, y: [x, y], a, y=b)


_WAYS: list[Callable[[Any, Any], Any]] = [
    _in_a_cell,
    _in_a_default,
    _in_a_keyword,
    _in_keywords,
    _in_an_attribute,
    _in_a_wrapper,
    _in_an_inner_function,
    _in_a_partial,
    _in_a_partial_method,
    _in_a_recursion,
    lambda a, b: [a, b, a],
    lambda a, b: (a, 3),
    lambda a, b: {"a": a, "b": b},
    lambda a, b: OrderedDict(b=b, a=a),
    lambda a, b: Triple(a, "x", b),
]


def closure(random: Random) -> Callable[[], Any]:
    """Return a function that holds tensors, some of them several times."""
    made: list[Any] = [Tensor(random.randrange(1000, 99999)), 1.5, None]

    def build(depth: int) -> Any:
        kind = random.randrange(10)
        if kind == 0:
            return random.choice(made)
        if depth == 0:
            made.append(Tensor(random.randrange(1000, 99999)))
        else:
            made.append(random.choice(_WAYS)(build(depth - 1), build(depth - 1)))
        return made[-1]

    parts = [build(random.randrange(5)) for _ in range(2)]
    return lambda: parts
