"""How time grows with the number of ops in a chain, the number of tensors of a call, and the order."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keras import ops

from .cases import Case, chain, log1pexp, nested
from .measure import time_in_turns
from .native import active

_IMPLEMENTATIONS = ("native", "multigrad")


@dataclass
class Curve:
    """The time of each implementation, in microseconds, as a function of a size."""

    axis: str
    """The name of the size."""
    sizes: list[int]
    times: dict[str, list[float]]


def curves(rounds: int) -> list[Curve]:
    """Measure forward and backward passes in eager code."""
    return [
        _curve("ops in a chain", [1, 3, 10, 30, 100, 300, 1000], lambda n: _runs(chain(n)), rounds),
        _curve("tensors in a call", [1, 3, 10, 30, 100, 300], lambda n: _runs(nested(n)), rounds),
        _curve("order of the derivative", [1, 2, 3, 4], _derivatives, rounds),
    ]


def _curve(
    axis: str, sizes: list[int], make_runs: Callable[[int], Mapping[str, Callable[[], Any]]], rounds: int
) -> Curve:
    timings = [time_in_turns(make_runs(size), rounds) for size in sizes]
    return Curve(axis, sizes, {name: [timing[name].median for timing in timings] for name in timings[0]})


def _runs(case: Case) -> dict[str, Callable[[], Any]]:
    return {name: active.runner(case.implementations[name], case.args) for name in _IMPLEMENTATIONS}


def _derivatives(order: int) -> dict[str, Callable[[], Any]]:
    """Return runs of the derivative of `sin(log1pexp(x))` of this order.

    The native op on PyTorch saves `e` as a constant, so its second derivative is faster than multigrad's, and
    wrong. The sine has derivatives of every order, so that the native op still has something to compute.
    """
    case = log1pexp()
    functions = {name: lambda x, f=case.implementations[name]: ops.sin(f(x)) for name in _IMPLEMENTATIONS}
    derivatives = {name: active.derivative(f, order) for name, f in functions.items()}
    return {name: lambda f=f: f(*case.args) for name, f in derivatives.items()}
