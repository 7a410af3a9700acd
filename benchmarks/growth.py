"""How time grows: with the length of a chain of ops, with the leaves of a call, with the order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras import ops

from .cases import Case, chain, log1pexp, nested
from .measure import in_turns
from .native import active

_WAYS = ("native", "multigrad")


@dataclass
class Curve:
    """Microseconds of each way, at each place of an axis."""

    axis: str
    places: list[int]
    times: dict[str, list[float]]


def curves(rounds: int) -> list[Curve]:
    """Forward and backward, in eager code."""
    return [
        _curve("ops in a chain", [1, 3, 10, 30, 100, 300, 1000], lambda n: _runs(chain(n)), rounds),
        _curve("tensors in a call", [1, 3, 10, 30, 100, 300], lambda n: _runs(nested(n)), rounds),
        _curve("order of the derivative", [1, 2, 3, 4], _orders, rounds),
    ]


def _curve(
    axis: str, places: list[int], runs: Callable[[int], Mapping[str, Callable[[], Any]]], rounds: int
) -> Curve:
    timings = [in_turns(runs(place), rounds) for place in places]
    return Curve(axis, places, {way: [timing[way].median for timing in timings] for way in timings[0]})


def _runs(case: Case) -> dict[str, Callable[[], Any]]:
    return {way: active.runner(case.ways[way], case.args) for way in _WAYS}


def _orders(order: int) -> dict[str, Callable[[], Any]]:
    """By hand on PyTorch, the rule's own derivative through `e` is lost: it is faster, and wrong.

    The sine around it has derivatives of every order, so that there is something left of the one by hand.
    """
    case = log1pexp()
    whole = {way: lambda x, f=case.ways[way]: ops.sin(f(x)) for way in _WAYS}
    derivatives = {way: active.derivative(f, order) for way, f in whole.items()}
    return {way: lambda f=f: f(*case.args) for way, f in derivatives.items()}
