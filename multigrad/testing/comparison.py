"""`compare_backends`: one function on each installed backend."""

import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import numpy as np

from multigrad.errors import message
from multigrad.frameworks import DIFFERENTIATING, how_to_add, is_installed
from multigrad.processes import run_on
from multigrad.testing.mismatches import GRADIENT, Unlike, disagree, number_text, places, relative, table
from multigrad.testing.precision import Tolerance, size_of

_NAME = "compare_backends"


@dataclass(frozen=True)
class Compared:
    """What backends were compared, all of which agreed."""

    backends: tuple[str, ...]
    """Those that were compared."""
    missing: tuple[str, ...]
    """Those that are not installed."""
    largest: Mapping[str, float]
    """How far one was off at most from the first, relative to the largest element, for each output
    and each gradient."""


@dataclass(frozen=True)
class Measured:
    """What one backend measured: arrays by name, and the dtype with the fewest digits behind each."""

    arrays: Mapping[str, np.ndarray]
    precisions: Mapping[str, str]


def compare_backends(
    path_or_code: str | Path,
    *,
    backends: Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Compared:
    """Run one function on each installed backend, in a process each, and compare values and gradients.

    ```python
    from multigrad.frameworks import DIFFERENTIATING, is_installed
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
        print(compare_backends(CODE).backends)  # ('tensorflow', 'jax', 'torch')
    ```

    Arguments:
        path_or_code: the path of a Python file, as a `Path` or a string of one line that ends with `.py`; or
            its text. It must define `fn`, a function, and `args`, a tuple or list of its arguments. These
            may be NumPy arrays, numbers and nested structures of them; `fn` may return any structure. If
            there are floats of double precision among them, JAX has them too. The processes do not share
            random numbers: draw them with NumPy, from a seed.
        backends: those to compare, the first of which the others are compared with; all that
            differentiate and are installed, if not given.
        rtol, atol: two numbers agree where `abs(a - b) <= atol + rtol * abs(b)`. They depend on the dtypes
            where they are not given: with `e = 5 * eps ** (2/3)`, `rtol` is `e`, and `atol` is `e` times
            the largest element: 1e-4 in float32. That of a gradient is larger by `4 * eps` times the
            largest of all numbers, which is what may be left of one that is zero. Integers are compared
            exactly.

    Returns:
        What was compared: the `backends`, those that are `missing`, and for each output and gradient the
        `largest` relative difference. The gradient is that by each argument and each trainable variable
        that `fn` reads, of the outputs weighted by fixed pseudo-random numbers.

    Raises:
        AssertionError: where backends disagree, with a table of the values on each.
        ValueError: where fewer than two backends are installed, or one of `backends` is not.
        RuntimeError: where a process fails, with what it wrote to stderr.
    """
    __tracebackhide__ = True
    missing = tuple(name for name in DIFFERENTIATING if not is_installed(name))
    chosen = tuple(backends or [name for name in DIFFERENTIATING if name not in missing])
    _require(chosen, missing)
    with TemporaryDirectory() as folder:
        source = _source(path_or_code, Path(folder))
        with ThreadPoolExecutor(len(chosen)) as threads:
            measured = list(threads.map(lambda name: measure(name, source, Path(folder)), chosen))
    largest = compare(dict(zip(chosen, measured, strict=True)), missing, rtol, atol)
    return Compared(chosen, missing, largest)


def _require(chosen: Sequence[str], missing: Sequence[str]) -> None:
    """See that there are backends to compare."""
    absent = [name for name in chosen if name in missing]
    unknown = [name for name in chosen if name not in DIFFERENTIATING]
    if absent or unknown or len(set(chosen)) < 2:
        raise ValueError(
            message(
                _NAME,
                "there are no such backends to compare",
                required=f"two or more of {', '.join(DIFFERENTIATING)}, installed",
                got=f"{', '.join(chosen) or 'none'}; not installed: {', '.join(missing) or 'none'}",
                mend="; ".join(map(how_to_add, missing)) or "name others",
            )
        )


def _source(path_or_code: str | Path, folder: Path) -> Path:
    """The file to run."""
    if isinstance(path_or_code, Path) or ("\n" not in path_or_code and path_or_code.endswith(".py")):
        return Path(path_or_code).resolve(strict=True)
    source = folder / "compared.py"
    source.write_text(textwrap.dedent(path_or_code), encoding="utf-8")
    return source


def measure(backend: str, source: Path, folder: Path) -> Measured:
    """Run the file in a process on this backend, which writes what it measured to the folder.

    Raises:
        RuntimeError: where the process fails.
    """
    answer = folder / f"{backend}.npz"
    done = run_on(backend, "multigrad.testing", str(source), str(answer), capture=True)
    if done.returncode:
        raise RuntimeError(
            message(
                _NAME,
                f"the process on {backend} failed",
                required="a file that runs, and defines `fn` and `args`",
                got=f"exit status {done.returncode}, and on stderr:\n{done.stderr.strip()}",
                mend="correct what it says",
            )
        )
    with np.load(answer) as found:
        names = [str(name) for name in found["names"]]
        arrays = {name: found[f"array{i}"] for i, name in enumerate(names)}
        precisions = dict(zip(names, map(str, found["precisions"]), strict=True))
    return Measured(arrays, precisions)


def compare(
    measured: Mapping[str, Measured],
    missing: Sequence[str],
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, float]:
    """See that what backends measured agrees with the first.

    Returns:
        The largest relative difference of each output and gradient.
    """
    __tracebackhide__ = True
    first, *others = measured
    unlike: list[Unlike] = []
    largest: dict[str, float] = {}
    _require_alike(measured)
    own = measured[first]
    of_all = size_of(*[array for name, array in own.arrays.items() if own.precisions[name] != "exact"])
    for name, wanted in measured[first].arrays.items():
        precision = max((m.precisions[name] for m in measured.values()), key=_ORDER.index)
        rules = Tolerance(precision, rtol, atol) if precision != "exact" else None
        size = size_of(wanted)
        gradient = of_all if name.startswith(GRADIENT) else 0.0
        largest[name] = 0.0
        for other in others:
            got = measured[other].arrays[name]
            limits = (0.0, 0.0)
            if rules:
                limits = rules.rounding if rtol is None else rtol, rules.atol(rules.rounding * size, gradient)
            alike = (np.isnan(got) & np.isnan(wanted)) | (got == wanted)
            bad = disagree(got, wanted, *limits) & ~alike
            pair = f"{other}, {first}"
            unlike += [Unlike((name, pair), place, (got[place], wanted[place])) for place in places(bad)]
            with np.errstate(invalid="ignore"):  # of two that are infinite
                apart = np.abs(np.where(alike, 0.0, 1.0 * got - wanted))
            largest[name] = max(largest[name], relative(float(np.max(apart, initial=0.0)), size))
    if unlike:
        _fail(unlike, measured, missing)
    return largest


_ORDER = ["exact", "float64", "float32", "float16", "bfloat16"]


def _require_alike(measured: Mapping[str, Measured]) -> None:
    """See that all backends have the same outputs, in the same shapes."""
    __tracebackhide__ = True
    shapes = {
        backend: {name: array.shape for name, array in own.arrays.items()}
        for backend, own in measured.items()
    }
    first, *others = shapes
    for other in others:
        names = [
            n for n in {**shapes[first], **shapes[other]} if shapes[first].get(n) != shapes[other].get(n)
        ]
        if names:
            required, got = (
                f"{shapes[backend].get(names[0], 'no such output')} on {backend}"
                for backend in (first, other)
            )
            raise AssertionError(
                message(
                    _NAME,
                    "the backends return different structures or shapes",
                    argument=names[0],
                    required=required,
                    got=got,
                    mend="return the same on each backend",
                )
            )


def _fail(unlike: list[Unlike], measured: Mapping[str, Measured], missing: Sequence[str]) -> NoReturn:
    __tracebackhide__ = True
    worst = max(unlike, key=Unlike.apart)
    other, first = worst.place[1].split(", ")
    got, wanted = map(number_text, worst.numbers)
    said = message(
        _NAME,
        "the backends disagree",
        argument=worst.place[0],
        required=f"{wanted}, as on {first}",
        got=f"{got} on {other}",
        mend="look at what differs; or pass rtol and atol, where it is rounding",
    )
    compared = f"compared: {', '.join(measured)}; not installed: {', '.join(missing) or 'none'}"
    headings = ("what", "backends", "element", "one", "the other", "relative")
    raise AssertionError(f"{said}\n{compared}\n{table(headings, unlike)}")
