"""The clock: what several ways of doing one thing take, in turns, so that all meet the same machine."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .native import active


@dataclass
class Timing:
    """Microseconds of one run: the median over the rounds, and the middle half of them."""

    median: float
    low: float
    high: float
    ratio: float
    """The median over the rounds of the ratio to the first way in the same round."""


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = 0.004) -> dict[str, Timing]:
    """How long each way takes, in so many rounds of about `seconds` for each.

    The first way is the one that the others are compared with. The collector of garbage waits: none of the
    ways makes any, and it would strike one of them.
    """
    repeats = {name: _repeats(run, seconds) for name, run in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(_time(ways[name], repeats[name]) * 1e6)
    finally:
        gc.enable()
    first = times[names[0]]
    return {name: _timing(own, first) for name, own in times.items()}


def _timing(own: list[float], first: list[float]) -> Timing:
    low, median, high = statistics.quantiles(own, n=4) if len(own) > 1 else own * 3
    return Timing(median, low, high, statistics.median(a / b for a, b in zip(own, first, strict=True)))


def _repeats(run: Callable[[], Any], seconds: float) -> int:
    for _ in range(3):  # what is done once is done now
        active.wait(run())
    took = min(_time(run, 1) for _ in range(3))
    return max(1, round(seconds / took))


def _time(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = run()
    active.wait(result)
    return (time.perf_counter() - start) / repeats
