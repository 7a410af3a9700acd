"""A pytest plugin: Keras's own tests, with multigrad's op in the place of `keras.ops.custom_gradient`.

Keras uses that function in its quantizers and quantized layers, and the tests of them come with the
package (3.15). `nox -s keras_tests` runs them with `-p keras_own`. With `--custom-gradient keras` Keras's
own function stays, which tells whose fault a failure is. A line at the end says how many functions were
decorated and how often they were called; a run without any has failed.

Names under `keras.src` are private. They are named here because what is tested is code that calls Keras's
function by them, and was not written for multigrad. One that is gone ends a run before its first test.
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

# The active backend's function, and the names of the one by which Keras's code and its users reach it.
PLACE = "keras.src.backend.core.custom_gradient"
NAMES = ("keras.ops.custom_gradient", "keras.src.ops.custom_gradient", "keras.src.ops.core.custom_gradient")

_counts: Counter[str] = Counter()  # of the test that is running
_totals: Counter[str] = Counter()  # of the tests that have run, in whichever process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--custom-gradient", choices=("multigrad", "keras"), default="multigrad")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: which each backend is that runs here")
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
    """Put `replacement` wherever a module of Keras holds `own`."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "keras"]:
        for name in [name for name, value in vars(module).items() if value is own]:
            setattr(module, name, replacement)


def _counted(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """`decorate`, counting what it decorates and the calls of that."""

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
    item.user_properties.append(("custom_gradient", dict(_counts)))  # goes with the report of the test
    _counts.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        counts = dict(report.user_properties)["custom_gradient"]
        _totals.update(counts, tests=1, reached=1 if counts else 0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    in_worker = hasattr(session.config, "workerinput")  # of pytest-xdist, with a part of the tests
    if not in_worker and not _totals["calls"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.write_line(
        f"{config.option.custom_gradient}'s custom_gradient in Keras {keras.__version__} on "
        f"{keras.backend.backend()}: {_totals['decorations']} decorations and {_totals['calls']} calls, in "
        f"{_totals['reached']} of {_totals['tests']} tests"
    )
