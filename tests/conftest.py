"""The same tests run on every backend. `KERAS_BACKEND` selects the backend of a run."""

import gc
import importlib.util
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import keras
import pytest
from accelerator import use_accelerator
from support import BACKEND, DIFFERENTIATES

BACKENDS = ("tensorflow", "jax", "torch", "numpy", "openvino")

# Tests of one framework are in separate files, which runs on other backends do not collect.
_OTHERS = [name for name in ("tensorflow", "jax", "torch") if name != BACKEND]
# The folders are not named like the frameworks, because `tests/transforms` is in the path of imports.
collect_ignore = [f"transforms/on_{name}" for name in _OTHERS]
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


@pytest.fixture
def plt() -> Iterator[Any]:
    """Matplotlib without a window."""
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def pytest_report_header() -> str:
    return f"Keras {keras.__version__} on {BACKEND}, {ACCELERATOR or 'no accelerator'}"


def left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that the fast run of this backend leaves out: all but one of each test.

    Another backend has another case. On PyTorch, where a case of most tests takes 25 ms, the tests that other
    backends have too keep all cases. A notebook takes 20 s there as well.
    """
    cases = defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "package"))):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, of_test in cases.items():
        if BACKEND != "torch" or any(part in name for part in ("/on_torch", "notebooks")):
            chosen = (zlib.crc32(name.encode()) + BACKENDS.index(BACKEND)) % len(of_test)
            yield from (item for number, item in enumerate(of_test) if number != chosen)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that the fast run leaves out, and deselect gradients on a backend without them."""
    if not DIFFERENTIATES:
        forward = [item for item in items if item.get_closest_marker("forward")]
        config.hook.pytest_deselected(items=[item for item in items if item not in forward])
        items[:] = forward
    for item in items:
        is_slow = any(BACKEND in marker.args for marker in item.iter_markers("slow_on"))
        if is_slow and not item.get_closest_marker("package"):
            item.add_marker("slow")
    for item in left_out(items):
        item.add_marker("slow")
