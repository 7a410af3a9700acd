"""The same tests run on every backend. `KERAS_BACKEND` selects the backend of a run."""

import gc
import importlib.util
import zlib
from collections import defaultdict
from collections.abc import Iterator

import keras
import pytest
from accelerator import use_accelerator
from processor_time import pytest_runtest_call, pytest_runtest_protocol  # noqa: F401  hooks of pytest
from support import BACKEND, DIFFERENTIATES

from multigrad.common.frameworks import DIFFERENTIATING

# Tests of one framework are in separate files, which runs on other backends do not collect.
_OTHERS = [name for name in ("tensorflow", "jax", "torch") if name != BACKEND]
# The folders are not named like the frameworks, because `tests/transforms` is in the path of imports.
collect_ignore = [
    path.format(name) for name in _OTHERS for path in ("backends/test_{}.py", "transforms/on_{}")
]
if not DIFFERENTIATES:
    # These files import hand-written derivatives, and the framework's gradient functions.
    collect_ignore += ["test_benchmarks.py", "test_gradient_checks.py"]
    collect_ignore += ["transforms/test_ways_in_forms.py", "transforms/test_one_array.py"]
    collect_ignore += ["test_training_steps.py"]
if not DIFFERENTIATES or importlib.util.find_spec("nbclient") is None:
    # nox installs Jupyter. It is not needed for a run of a few tests.
    collect_ignore += ["notebooks.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", action="store_true", help="keep the outputs of the notebooks that run")


ACCELERATOR = use_accelerator()


def pytest_configure(config: pytest.Config) -> None:
    if BACKEND == "numpy":
        # Keras (3.15) infers shapes there by running a function on uninitialized arrays.
        what = "(invalid value|overflow|underflow|divide by zero) encountered"
        config.addinivalue_line("filterwarnings", f"ignore:{what}:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def exclude_from_collection() -> None:
    """Exclude existing objects from garbage collection, so that tests that collect are faster."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"Keras {keras.__version__} on {BACKEND}, {ACCELERATOR or 'no accelerator'}"


# The fast run takes a third of the cases of a test with more cases than this, another third on each backend.
# The second number is for the tests of one framework, whose other thirds are in the full run alone.
FEW_CASES, FEW_OF_ONE_FRAMEWORK = 3, 12


def other_thirds(items: list[pytest.Item], third: int) -> Iterator[pytest.Item]:
    """Yield the cases of fast tests with many cases, but for one third of them, and for at least one.

    The name of a case decides, so that it is in one of the three thirds wherever it is collected.
    """
    cases = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "package", "every_case"))):
            cases[item.nodeid.partition("[")[0]].append((zlib.crc32(item.nodeid.encode()), item))
    for name, of_test in cases.items():
        is_of_one_framework = "/on_" in name or "/backends/" in name
        if len(of_test) > (FEW_OF_ONE_FRAMEWORK if is_of_one_framework else FEW_CASES):
            first = min(number for number, _ in of_test)
            has_one = any(number % 3 == third for number, _ in of_test)
            for number, item in of_test:
                if number % 3 != third and (has_one or number != first):
                    yield item


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark two thirds of many cases as slow, and deselect tests of gradients on a backend without them."""
    if DIFFERENTIATES:
        for item in other_thirds(items, DIFFERENTIATING.index(BACKEND)):
            item.add_marker("slow")
        return
    left_out = [item for item in items if item.get_closest_marker("forward") is None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
