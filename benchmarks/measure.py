"""Time several implementations in alternation, so that disturbances of the machine affect all of them."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .native import active


@dataclass
class Timing:
    """The time of one run in microseconds: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float
    ratio: float
    """The median over the rounds of the ratio to the first implementation in the same round."""
    processor: float
    """The same ratio for processor time, summed over all threads. It includes the pause after each turn.

    Threads that wait for work, as those of PyTorch do, add a constant, which moves the ratio towards 1.
    """


def time_in_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = 0.004
) -> dict[str, Timing]:
    """Time implementations in alternation.

    The garbage collector is disabled: the implementations create no cycles, and a collection would slow down
    only one of them. A pause follows each turn and is as long as the turn. It keeps computations that are
    still running in the background, such as a gradient that is not needed, out of the next turn.

    Arguments:
        runs: the implementations by name. The first is the reference of the ratios.
        rounds: the number of turns of each implementation.
        seconds: the approximate length of a turn. Fast implementations run several times in a turn.
    """
    repeats = {name: _repeats(run, seconds) for name, run in runs.items()}
    # Wall-clock and processor time of one run, in seconds.
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                processor_start = time.process_time()
                wall = _time(runs[name], repeats[name])
                time.sleep(wall)
                processor = time.process_time() - processor_start
                times[name].append((wall / repeats[name], processor / repeats[name]))
    finally:
        gc.enable()
    reference = times[names[0]]
    return {name: _timing(measured, reference) for name, measured in times.items()}


def _timing(measured: list[tuple[float, float]], reference: list[tuple[float, float]]) -> Timing:
    walls = [wall * 1e6 for wall, _ in measured]
    low, median, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else walls * 3
    pairs = list(zip(measured, reference, strict=True))
    ratio = statistics.median(a / b for (a, _), (b, _) in pairs)
    return Timing(median, low, high, ratio, statistics.median(a / b for (_, a), (_, b) in pairs))


def _repeats(run: Callable[[], Any], seconds: float) -> int:
    for _ in range(3):  # warm up: tracing, compilation, caches
        active.wait(run())
    fastest = min(_time(run, 1) for _ in range(3))
    return max(1, round(seconds / fastest))


def _time(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        result = run()
    active.wait(result)
    return time.perf_counter() - start
