"""Measure how often `check_gradients` rejects right rules, and how often it finds wrong ones.

    KERAS_BACKEND=jax python -m benchmarks.gradient_checks --rules 1000

Every rule belongs to a random family of `right_rules`, with arguments of a random shape, dtype and scale
between 0.1 and 10. Right rules are checked to the second order. Wrong rules differ by 1 %: in the gradient of
one argument, in one element of it, or in the second derivative only. Every rule has a seed of its own, which
is printed if the check is mistaken.

By default, the check computes in float64, in which the tolerances are small. With `--dtype own`, all
arguments are float32, and the functions compute in float32.
"""

import argparse
import collections
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad.ops import scale_gradient
from multigrad.testing import check_gradients

from .right_rules import FAMILIES, Family

FACTOR = 1.01
"""The factor of a wrong gradient."""

LARGE_FACTOR = 10.0
"""The factor of a very wrong gradient. If it is not found either, the gradient is zero up to rounding."""


def nothing(gradients: list[Any], which: float, factor: float) -> list[Any]:
    """Return the right gradients."""
    return gradients


def one_argument(gradients: list[Any], which: float, factor: float) -> list[Any]:
    """Multiply the gradient of one argument by a wrong factor."""
    chosen = int(which * len(gradients))
    return [gradient * factor if i == chosen else gradient for i, gradient in enumerate(gradients)]


def one_element(gradients: list[Any], which: float, factor: float) -> list[Any]:
    """Multiply the gradient of one element by a wrong factor."""
    sizes = np.cumsum([0, *[int(np.prod(gradient.shape)) for gradient in gradients]])
    chosen = int(which * sizes[-1])
    factors = [
        np.where(np.arange(size).reshape(gradient.shape) == chosen - first, factor, 1.0)
        for first, size, gradient in zip(sizes[:-1], np.diff(sizes), gradients, strict=True)
    ]
    return [g * ops.convert_to_tensor(f, dtype=g.dtype) for g, f in zip(gradients, factors, strict=True)]


def second_derivative(gradients: list[Any], which: float, factor: float) -> list[Any]:
    """Return the right gradients, whose derivatives have a wrong factor."""
    return [scale_gradient(gradient, factor) for gradient in gradients]


CHANGES: dict[str, tuple[Callable[[list[Any], float, float], list[Any]], int]] = {
    "right": (nothing, 2),
    "one argument": (one_argument, 1),
    "one element": (one_element, 1),
    "second derivative": (second_derivative, 2),
}
"""For each kind of rule, its gradients, and the order to which it is checked."""


def draw(seed: int, own: bool) -> tuple[Family, list[np.ndarray], float]:
    """Return a random family, arguments, and a number that chooses the wrong argument or element."""
    random = np.random.default_rng(seed)
    family = FAMILIES[random.integers(len(FAMILIES))]
    dtype = "float32" if own else str(random.choice(["float32", "float64"]))
    return family, family.draw(random, dtype, 10.0 ** random.uniform(-1.0, 1.0)), random.uniform()


def rejected(kind: str, seed: int, own: bool = False, factor: float = FACTOR, **options: Any) -> str:
    """Return the message of the check if it rejects the rule of this seed, and an empty string otherwise."""
    family, arguments, which = draw(seed, own)
    change, order = CHANGES[kind]
    op = family.op(lambda gradients: change(gradients, which, factor))
    try:
        check_gradients(op, *arguments, order=order, dtype="own" if own else None, **options)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_checks", description=__doc__)
    parser.add_argument("--rules", type=int, default=1000, help="the number of rules of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", nargs="*", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--dtype", choices=["default", "own"], default="default")
    parser.add_argument("--max-elements", type=int, default=100, help="the elements to move in each argument")
    parser.add_argument("--compiled", action="store_true", help="check the compiled functions, too")
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    own, results = options.dtype == "own", {}
    checks = {"compiled": options.compiled, "max_elements": options.max_elements}
    for kind in options.kinds:
        start = time.perf_counter()
        mistaken: collections.Counter[str] = collections.Counter()
        zeros = 0
        for seed in range(options.first, options.first + options.rules):
            said = rejected(kind, seed, own, **checks)
            if bool(said) != (kind == "right"):
                continue
            if kind != "right" and not rejected(kind, seed, own, LARGE_FACTOR, **checks):
                zeros += 1
                continue
            family, arguments, _ = draw(seed, own)
            mistaken[family.name] += 1
            shapes = [array.shape for array in arguments]
            print(
                f"  {kind}, seed {seed}: {family.name}, {arguments[0].dtype} of {shapes}\n{said}", flush=True
            )
        results[kind] = {
            "rules": options.rules - zeros,
            "zeros": zeros,
            "mistaken": mistaken.total(),
            "families": mistaken,
            "seconds": (time.perf_counter() - start) / options.rules,
        }
        print(keras.backend.backend(), options.dtype, kind, results[kind], flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
