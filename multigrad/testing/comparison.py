"""`compare_backends`: run one function on each installed backend and compare the results."""

import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from multigrad.common.errors import message, unusable
from multigrad.common.frameworks import DIFFERENTIATING, how_to_add, is_installed
from multigrad.common.processes import run_on
from multigrad.testing.mismatches import (
    GRADIENT_PREFIX,
    Mismatch,
    find_mismatches,
    format_number,
    format_table,
    relative_to,
    worst_of,
)
from multigrad.testing.precision import Tolerance, largest_magnitude

_NAME = "compare_backends"

_PRECISIONS = ["exact", "float64", "float32", "float16", "bfloat16"]
"""From the most precise to the least precise."""


@dataclass(frozen=True)
class ComparisonResult:
    """The result of a successful comparison."""

    backends: tuple[str, ...]
    """The backends that were compared."""
    missing: tuple[str, ...]
    """The backends that are not installed."""
    largest: Mapping[str, float]
    """For each output and gradient, the largest difference from the first backend, relative to the largest
    element."""


@dataclass(frozen=True)
class Measurement:
    """The outputs and gradients of a function on one backend."""

    arrays: Mapping[str, np.ndarray]
    """The arrays by name."""
    precisions: Mapping[str, str]
    """The least precise dtype that each array was computed from, or "exact" for integers."""


def compare_backends(
    path_or_code: str | Path,
    *,
    backends: Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> ComparisonResult:
    """Run a function on each installed backend, and compare its outputs and gradients.

    ```python
    from multigrad.common.frameworks import DIFFERENTIATING, is_installed
    from multigrad.testing import compare_backends

    CODE = '''
    import multigrad
    import numpy as np
    from keras import ops

    @multigrad.op_custom_gradient
    def fn(x):
        return ops.log1p(ops.exp(x)), lambda upstream: upstream * ops.sigmoid(x)

    args = (np.array([-1.0, 0.0, 2.0], "float32"),)
    '''
    if all(map(is_installed, DIFFERENTIATING)):
        assert compare_backends(CODE).backends == ("tensorflow", "jax", "torch")
    ```

    Each backend runs in its own process, because Keras supports one backend per process. The outputs are
    weighted by fixed pseudo-random numbers, and differentiated with respect to each floating argument and
    each trainable variable that the function reads.

    Arguments:
        path_or_code: the path of a Python file, as a `Path` or a one-line string that ends with `.py`, or
            Python code. The code must define a function `fn` and its arguments `args`, a tuple or list of
            NumPy arrays, numbers and nested structures of them. `fn` may return any nested structure. If
            `args` contains float64, JAX has float64 enabled. The processes do not share random numbers, so
            draw them with NumPy and a fixed seed.
        backends: the backends to compare. The first is the reference for the others. The default is all
            installed backends that compute gradients.
        rtol, atol: two numbers agree if `abs(a - b) <= atol + rtol * abs(b)`. The defaults depend on the
            dtype. With `e = 5 * eps ** (2/3)`, which is 1e-4 in float32, `rtol` is `e`, and `atol` is `e`
            times the largest element. For gradients, `atol` is larger by `4 * eps` times the largest of all
            numbers, in case the terms of a gradient cancel. Integers must be equal.

    Returns:
        An object with the `backends` that were compared, the `missing` backends, and the `largest` relative
        difference for each output and gradient.

    Raises:
        AssertionError: if backends disagree. The message shows a table of the numbers on each backend.
        ValueError: if fewer than two backends are installed, or if one of `backends` is not.
        RuntimeError: if a process fails. The message contains its stderr.
    """
    __tracebackhide__ = True
    missing = tuple(name for name in DIFFERENTIATING if not is_installed(name))
    chosen = tuple(backends or [name for name in DIFFERENTIATING if name not in missing])
    _require_comparable(chosen, missing)
    with TemporaryDirectory() as folder:
        source = _source_file(path_or_code, Path(folder))
        with ThreadPoolExecutor(len(chosen)) as threads:
            measurements = list(threads.map(lambda name: measure(name, source, Path(folder)), chosen))
    largest = compare(dict(zip(chosen, measurements, strict=True)), missing, rtol, atol)
    return ComparisonResult(chosen, missing, largest)


def _require_comparable(chosen: Sequence[str], missing: Sequence[str]) -> None:
    """Raise if the chosen backends are not two or more installed backends that compute gradients."""
    not_installed = [name for name in chosen if name in missing]
    unknown = [name for name in chosen if name not in DIFFERENTIATING]
    if not_installed or unknown or len(set(chosen)) < 2:
        required = f"two or more of {', '.join(DIFFERENTIATING)}"
        required += f" that are installed, unlike {', '.join(missing)}" if missing else ""
        fix = "; ".join(map(how_to_add, missing)) or "pass other backends"
        raise unusable(ValueError, _NAME, "backends", required=required, got=chosen, fix=fix)


def _source_file(path_or_code: str | Path, folder: Path) -> Path:
    """Return the path of the file to run. Code is written to a file in `folder`."""
    if isinstance(path_or_code, Path) or ("\n" not in path_or_code and path_or_code.endswith(".py")):
        return Path(path_or_code).resolve(strict=True)
    source = folder / "compared.py"
    source.write_text(textwrap.dedent(path_or_code), encoding="utf-8")
    return source


def measure(backend: str, source: Path, folder: Path) -> Measurement:
    """Run a file on a backend in a new process, which writes its results to `folder`.

    Raises:
        RuntimeError: if the process fails.
    """
    result = folder / f"{backend}.npz"
    process = run_on(backend, "multigrad.testing", "measure", str(source), str(result))
    if process.returncode:
        problem = f"the process on {backend} failed"
        required = "a file that defines `fn` and `args` and runs without errors"
        got = f"exit status {process.returncode}, and on stderr:\n{process.stderr.strip()}"
        fix = "correct the error that stderr shows"
        raise RuntimeError(message(_NAME, problem, required=required, got=got, fix=fix))
    with np.load(result) as data:
        names = [str(name) for name in data["names"]]
        arrays = {name: data[f"array{i}"] for i, name in enumerate(names)}
        precisions = dict(zip(names, map(str, data["precisions"]), strict=True))
    return Measurement(arrays, precisions)


def compare(
    measurements: Mapping[str, Measurement],
    missing: Sequence[str],
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, float]:
    """Compare the measurements of each backend with the first backend.

    Returns:
        The largest relative difference for each output and gradient.

    Raises:
        AssertionError: if the measurements disagree.
    """
    __tracebackhide__ = True
    first, *others = measurements
    mismatches: list[Mismatch] = []
    largest: dict[str, float] = {}
    _require_same_shapes(measurements)
    reference = measurements[first]
    inexact = [array for name, array in reference.arrays.items() if reference.precisions[name] != "exact"]
    largest_number = largest_magnitude(*inexact)
    for name, required in reference.arrays.items():
        precision = max((m.precisions[name] for m in measurements.values()), key=_PRECISIONS.index)
        size = largest_magnitude(required)
        gradient = largest_number if name.startswith(GRADIENT_PREFIX) else 0.0
        limits = 0.0, 0.0
        if precision != "exact":
            tolerance = Tolerance(precision, rtol, atol)
            rounding = tolerance.rounding
            limits = rounding if rtol is None else rtol, tolerance.atol(rounding * size, gradient)
        largest[name] = 0.0
        for other in others:
            got = measurements[other].arrays[name]
            mismatches += find_mismatches((name, f"{other}, {first}"), got, required, *limits)
            with np.errstate(invalid="ignore"):  # inf - inf
                difference = largest_magnitude(1.0 * got - required)
            largest[name] = max(largest[name], relative_to(difference, size))
    if mismatches:
        worst = worst_of(mismatches)
        other, _ = worst.labels[1].split(", ")
        wrong, right = map(format_number, worst.numbers)
        text = message(
            _NAME,
            "the backends disagree",
            argument=worst.labels[0],
            required=f"{right} on {first}",
            got=f"{wrong} on {other}",
            fix="correct the function or its rule, or pass rtol and atol if the difference is rounding",
        )
        compared = f"compared: {', '.join(measurements)}; not installed: {', '.join(missing) or 'none'}"
        headings = ("name", "backends", "element", "first", "second", "relative")
        raise AssertionError(f"{text}\n{compared}\n{format_table(headings, mismatches)}")
    return largest


def _require_same_shapes(measurements: Mapping[str, Measurement]) -> None:
    """Raise if an output or gradient is missing on a backend or has another shape."""
    __tracebackhide__ = True
    for name in dict.fromkeys(name for each in measurements.values() for name in each.arrays):
        (first, shape), *others = (
            (backend, each.arrays[name].shape if name in each.arrays else "no such output")
            for backend, each in measurements.items()
        )
        for other, other_shape in others:
            if other_shape != shape:
                problem = "the backends return different structures or shapes"
                required, got = f"{shape} on {first}", f"{other_shape} on {other}"
                fix = "return the same structure and shapes on each backend"
                raise AssertionError(
                    message(_NAME, problem, argument=name, required=required, got=got, fix=fix)
                )
