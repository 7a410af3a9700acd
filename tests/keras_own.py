"""A pytest plugin: Keras's own tests, with the op of multigrad instead of `keras.ops.custom_gradient`.

Keras uses that function in its quantizers and quantized layers, whose tests are part of the package (3.15).
`nox -s keras_tests` runs them with `-p keras_own`. With `--custom-gradient keras`, the function of Keras
stays, which shows whether multigrad causes a failure. A line at the end reports how many functions were
decorated, and how often they were called. A run without decorated functions fails.

Names under `keras.src` are private. They are used here because the tests run code of Keras that calls its
function by these names. A missing name ends the run before the first test.
"""

import functools
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import pytest

from multigrad import op_custom_gradient

# The function of the active backend, and the names by which Keras and its users refer to it.
PLACE = "keras.src.backend.core.custom_gradient"
NAMES = ("keras.ops.custom_gradient", "keras.src.ops.custom_gradient", "keras.src.ops.core.custom_gradient")

_counts: Counter[str] = Counter()  # of the running test
_totals: Counter[str] = Counter()  # of the tests that have run, in all processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--custom-gradient", choices=("multigrad", "keras"), default="multigrad")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: true for every backend here")
    own = _named(PLACE)
    _replace(own, _counted(own if config.option.custom_gradient == "keras" else op_custom_gradient))
    for name in NAMES:
        _counts.clear()
        _named(name)(lambda x: (x, lambda upstream: upstream))(keras.ops.ones(1))
        if _counts != {"decorations": 1, "calls": 1}:
            raise pytest.UsageError(f"Keras {keras.__version__}: {name} does not lead to {PLACE}")
    _counts.clear()


def _named(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"Keras {keras.__version__} has no {name}") from error


def _replace(own: Any, replacement: Any) -> None:
    """Replace `own` by `replacement` in all modules of Keras."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]:
        for name in [name for name, value in vars(module).items() if value is own]:
            setattr(module, name, replacement)


def _counted(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `decorate`, with counts of the decorated functions and of their calls."""

    def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
        _counts["decorations"] += 1
        op = decorate(f)

        @functools.wraps(op)
        def counted(*args: Any, **kwargs: Any) -> Any:
            _counts["calls"] += 1
            return op(*args, **kwargs)

        return counted

    return custom_gradient


def pytest_runtest_teardown(item: pytest.Item) -> None:
    item.user_properties.append(("custom_gradient", dict(_counts)))  # sent with the report of the test
    _counts.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        counts = dict(report.user_properties)["custom_gradient"]
        _totals.update(counts, tests=1, reached=1 if counts else 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")  # a process of pytest-xdist, with a part of the tests
    if not in_worker and not _totals["calls"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(
        f"{config.option.custom_gradient}'s custom_gradient in Keras {keras.__version__} on "
        f"{keras.backend.backend()}: {_totals['decorations']} decorations and {_totals['calls']} calls, in "
        f"{_totals['reached']} of {_totals['tests']} tests"
    )
