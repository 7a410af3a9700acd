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
    processor: float
    """The same ratio of processor time, of all threads, with what still ran in the pause behind the turn.

    Threads that wait for work, as PyTorch's do, take a constant there, which draws the ratio towards 1.
    """


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = 0.004) -> dict[str, Timing]:
    """How long each way takes, in so many rounds of about `seconds` for each.

    The first way is the one that the others are compared with. The collector of garbage waits: none of the
    ways makes any, and it would strike one of them. So would what a way has computed in the background and
    nobody waits for, such as a gradient that is not needed: behind each there is a pause as long as its turn.
    """
    repeats = {name: _repeats(run, seconds) for name, run in ways.items()}
    # Seconds of one run, by the clock and of the processor.
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                used = time.process_time()
                took = _time(ways[name], repeats[name])
                time.sleep(took)
                used = time.process_time() - used
                times[name].append((took / repeats[name], used / repeats[name]))
    finally:
        gc.enable()
    first = times[names[0]]
    return {name: _timing(own, first) for name, own in times.items()}


def _timing(own: list[tuple[float, float]], first: list[tuple[float, float]]) -> Timing:
    walls = [wall * 1e6 for wall, _ in own]
    low, median, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else walls * 3
    pairs = list(zip(own, first, strict=True))
    ratio = statistics.median(a / b for (a, _), (b, _) in pairs)
    return Timing(median, low, high, ratio, statistics.median(a / b for (_, a), (_, b) in pairs))


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
    return time.perf_counter() - start
