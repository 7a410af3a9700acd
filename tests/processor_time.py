"""A fast test fails if it takes more than a few seconds of processor time. `conftest.py` imports these hooks.

Only the time of the test's process counts. Processes that a test starts import a framework again. Most of
these tests are marked `package`, and run once.
"""

import os
import time
from collections.abc import Generator

import pytest

# A loop, and its time on the machine that defines the limit of five seconds (Python 3.11).
LOOP, LOOP_SECONDS = 2_000_000, 0.06
# The limit on that machine.
SHORT = 5.0

SECONDS = pytest.StashKey[list[float]]()


def limit() -> float:
    """Return the limit in seconds: five on the machine that defines it.

    A loop measures the speed of this machine. The limit is doubled if processes share the cores.
    """
    start = time.process_time()
    for _ in range(LOOP):
        pass
    slower = max(1.0, (time.process_time() - start) / LOOP_SECONDS)
    return slower * (2 * SHORT if os.getloadavg()[0] > (os.cpu_count() or 1) else SHORT)


def is_too_long(seconds: float) -> bool:
    """Return whether a test took too long. The loop does not run for a test that is within every limit."""
    return seconds > SHORT and seconds > limit()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test that passes, and fail it if both of its runs took too long."""
    start = time.process_time()
    seconds = item.stash.setdefault(SECONDS, [])
    try:
        result = yield
    except BaseException:
        seconds.append(0.0)  # so that it does not run again
        raise
    seconds.append(time.process_time() - start)
    if len(seconds) == 2 and is_too_long(min(seconds)):
        took = f"{item.nodeid}: {min(seconds):.1f} s of processor time in the faster of two runs"
        pytest.fail(f"{took}, of at most {limit()} s: make it smaller, or mark it slow", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Run a fast test that took too long a second time: the first use of a compiler takes seconds."""
    result = yield
    seconds = item.stash.get(SECONDS, [])
    # The full run (`-m ""`) has no time limit, because its property tests generate many more examples.
    is_fast = item.config.option.markexpr and item.get_closest_marker("slow") is None
    if is_fast and len(seconds) == 1 and is_too_long(seconds[0]):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return result
