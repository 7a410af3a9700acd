"""Measure how often `check_gradients` rejects right rules, and how often it finds wrong ones.

    KERAS_BACKEND=jax python -m benchmarks.gradient_checks --rules 1000

Every rule belongs to a random family of `right_rules`, with arguments of a random shape, dtype and scale
between 0.1 and 10. Right rules are checked to the second order, also at special elements: 0, 1, -1, ties and
very large numbers. Wrong rules differ by 1 %: in the gradient of one argument, in one element of it, or in
the second derivative only. Others are very wrong at a special element, and right beside it. Every rule has a
seed of its own, which is printed if the check is mistaken.

By default, the check computes in float64, in which the tolerances are small. With `--dtype own`, all
arguments are float32, and the functions compute in float32.
"""

import argparse
import collections
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

WRONG_AT_A_POINT = (-1.0, 2.0, 1e6)
"""The factors of a gradient that is wrong at one special element."""

LARGE_FACTOR = 10.0
"""The factor of a very wrong gradient. If it is not found either, the gradient is zero up to rounding."""


@dataclass(frozen=True)
class Drawn:
    """A random family, its arguments, and a number that chooses the wrong argument or element."""

    family: Family
    arguments: list[np.ndarray]
    special: list[np.ndarray]
    """Where the arguments are special elements."""
    which: float

    def masks(self, candidates: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return arrays of False that are True at one of the candidates."""
        flat = np.flatnonzero(np.concatenate([array.ravel() for array in candidates]))
        chosen = flat[int(self.which * len(flat))]
        firsts = np.cumsum([0, *[array.size for array in candidates[:-1]]])
        return [
            np.arange(first, first + array.size).reshape(array.shape) == chosen
            for first, array in zip(firsts, candidates, strict=True)
        ]


Gradients = list[Any]


def nothing(gradients: Gradients, inputs: Sequence[Any], drawn: Drawn, factor: float) -> Gradients:
    """Return the right gradients."""
    return gradients


def one_argument(gradients: Gradients, inputs: Sequence[Any], drawn: Drawn, factor: float) -> Gradients:
    """Multiply the gradient of one argument by a wrong factor."""
    chosen = int(drawn.which * len(gradients))
    return [gradient * factor if i == chosen else gradient for i, gradient in enumerate(gradients)]


def one_element(gradients: Gradients, inputs: Sequence[Any], drawn: Drawn, factor: float) -> Gradients:
    """Multiply the gradient of one element by a wrong factor."""
    masks = drawn.masks([np.ones(array.shape, bool) for array in drawn.arguments])
    return [
        g * ops.cast(np.where(mask, factor, 1.0), g.dtype) for g, mask in zip(gradients, masks, strict=True)
    ]


def special_element(gradients: Gradients, inputs: Sequence[Any], drawn: Drawn, factor: float) -> Gradients:
    """Multiply the gradient of one special element by a wrong factor, and not beside the element."""
    wrong = []
    for g, x, array, mask in zip(gradients, inputs, drawn.arguments, drawn.masks(drawn.special), strict=True):
        is_there = ops.logical_and(ops.equal(x, ops.cast(array, x.dtype)), mask)
        wrong.append(g * ops.cast(ops.where(is_there, factor, 1.0), g.dtype))
    return wrong


def second_derivative(gradients: Gradients, inputs: Sequence[Any], drawn: Drawn, factor: float) -> Gradients:
    """Return the right gradients, whose derivatives have a wrong factor."""
    return [scale_gradient(gradient, factor) for gradient in gradients]


CHANGES: dict[str, tuple[Callable[..., Gradients], int]] = {
    "right": (nothing, 2),
    "special, right": (nothing, 2),
    "one argument": (one_argument, 1),
    "one element": (one_element, 1),
    "special element": (special_element, 1),
    "second derivative": (second_derivative, 2),
}
"""For each kind of rule, its gradients, and the order to which it is checked."""


def draw(seed: int, own: bool, kind: str = "right") -> Drawn:
    """Return a random family and arguments for it.

    Half of the right rules have very large elements. Beside them, many gradients are zero up to rounding.
    """
    random = np.random.default_rng(seed)
    family = FAMILIES[random.integers(len(FAMILIES))]
    dtype = "float32" if own else str(random.choice(["float32", "float64"]))
    arguments, which = family.draw(random, dtype, 10.0 ** random.uniform(-1.0, 1.0)), random.uniform()
    special: list[np.ndarray] = []
    if kind.startswith("special"):
        has_large = kind == "special, right" and seed % 2 == 0
        arguments, special = family.with_special(random, arguments, has_large)
    return Drawn(family, arguments, special, which)


def rejected(kind: str, seed: int, own: bool = False, is_large: bool = False, **options: Any) -> str:
    """Return the message of the check if it rejects the rule of this seed, and an empty string otherwise."""
    drawn = draw(seed, own, kind)
    change, order = CHANGES[kind]
    factor = WRONG_AT_A_POINT[seed % len(WRONG_AT_A_POINT)] if kind == "special element" else FACTOR
    factor = LARGE_FACTOR if is_large else factor
    op = drawn.family.op(lambda gradients, inputs: change(gradients, inputs, drawn, factor))
    try:
        check_gradients(op, *drawn.arguments, order=order, dtype="own" if own else None, **options)
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
            if bool(said) != kind.endswith("right"):
                continue
            if not kind.endswith("right") and not rejected(kind, seed, own, is_large=True, **checks):
                zeros += 1
                continue
            drawn = draw(seed, own, kind)
            mistaken[drawn.family.name] += 1
            shapes = [array.shape for array in drawn.arguments]
            dtype = drawn.arguments[0].dtype
            print(f"  {kind}, seed {seed}: {drawn.family.name}, {dtype} of {shapes}\n{said}", flush=True)
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
