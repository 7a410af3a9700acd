"""The fixed ops of `multigrad.ops`, compared with those of `keras.ops`: value and gradient, compiled.

`python -m benchmarks.fixed_ops` prints a table for the active backend, and `python -m benchmarks.fixed_ops
det` the rows of one op. An op that a backend has right is Keras's own object there, and has no row.
"""

import functools
import sys
from operator import attrgetter
from typing import Any

import numpy as np
from keras import backend, ops

import multigrad
from multigrad import jit, value_and_grad

from .measure import time_in_turns

RANDOM = np.random.default_rng(0)

# The op, the shape of its arguments, their number, and its other arguments.
CASES: list[tuple[str, tuple[int, ...], int, dict[str, Any]]] = [
    ("arctan2", (100_000,), 2, {}),
    ("arctan2", (1_000_000,), 2, {}),
    ("hypot", (100_000,), 2, {}),
    ("logaddexp", (100_000,), 2, {}),
    ("sinc", (100_000,), 1, {}),
    ("std", (1000, 100), 1, {"axis": -1}),
    ("norm", (1000, 100), 1, {"axis": -1}),
    ("normalize", (1000, 100), 1, {"axis": -1}),
    ("prod", (1000, 100), 1, {"axis": -1}),
    ("cumprod", (1000, 100), 1, {"axis": -1}),
    ("cumprod", (100, 1000), 1, {"axis": 0}),
    ("det", (1000, 3, 3), 1, {}),
    ("det", (1000, 4, 4), 1, {}),
    ("det", (100, 16, 16), 1, {}),
    ("det", (64, 64), 1, {}),
]


def value_and_gradient(op: Any, options: dict[str, Any], count: int) -> Any:
    """Return the compiled function that computes the sum of an op's outputs, and its gradient."""
    return jit(value_and_grad(lambda *xs: ops.sum(op(*xs, **options)), argnums=tuple(range(count))))


def main(*names: str) -> None:
    """Print the times."""
    print(
        f"| op on {backend.backend()} | shape | Keras, µs | multigrad, µs | factor |\n|---|---|---|---|---|"
    )
    for name, shape, count, options in CASES:
        keras_op, fixed = attrgetter(name)(ops), attrgetter(name)(multigrad.ops)
        if (names and name not in names) or fixed is keras_op:
            continue
        args = [ops.convert_to_tensor(RANDOM.standard_normal(shape, "float32")) for _ in range(count)]
        runs = {
            which: functools.partial(value_and_gradient(op, options, count), *args)
            for which, op in (("keras", keras_op), ("multigrad", fixed))
        }
        times = time_in_turns(runs, rounds=15)
        columns = [f"{time.median:.0f}" for time in times.values()]
        print(f"| `{name}` | {shape} | {' | '.join(columns)} | {times['multigrad'].ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
