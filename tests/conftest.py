"""One body of tests for every backend: `KERAS_BACKEND` says which one a run is for."""

import gc
import importlib.util
import os

import hypothesis
import keras
import pytest
from processor_time import pytest_runtest_call, pytest_runtest_protocol  # noqa: F401  hooks of pytest
from support import BACKEND, DIFFERENTIATES

# What is about one framework lives in a file of its own, which the others do not collect.
_OTHERS = [name for name in ("tensorflow", "jax", "torch") if name != BACKEND]
# The folders are not called by the framework's name alone: `tests/transforms` is in the path of imports.
collect_ignore = [
    path.format(name) for name in _OTHERS for path in ("backends/test_{}.py", "transforms/on_{}")
]
if not DIFFERENTIATES:
    # Which import what binds a derivative by hand, and the framework's ways to take one.
    collect_ignore += ["test_benchmarks.py", "transforms/test_ways.py"]
if not DIFFERENTIATES or importlib.util.find_spec("nbclient") is None:
    # Jupyter is installed by nox, and not by everyone who runs a few tests.
    collect_ignore += ["notebooks.py"]

# Of properties on random examples: so many of each, and the same ones in each run of CI.
hypothesis.settings.register_profile(
    "multigrad",
    max_examples=int(os.environ.get("MULTIGRAD_EXAMPLES", "2")),
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("multigrad")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", action="store_true", help="keep the outputs of the notebooks that run")


def pytest_configure(config: pytest.Config) -> None:
    if BACKEND == "numpy":
        # Keras (3.15) finds shapes there by running a function on arrays that hold what was in memory.
        what = "(invalid value|overflow|underflow|divide by zero) encountered"
        config.addinivalue_line("filterwarnings", f"ignore:{what}:RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def exclude_from_collection() -> None:
    """Exclude what exists so far from garbage collection, which many tests call and which would take long."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    return f"Keras {keras.__version__} on {BACKEND}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where a backend computes no gradients, leave out the tests that are about gradients."""
    if DIFFERENTIATES:
        return
    left_out = [item for item in items if item.get_closest_marker("forward") is None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
