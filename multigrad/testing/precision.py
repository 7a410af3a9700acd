"""How many digits a function has, and how far numbers may be apart for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multigrad.testing.flat_function import RESOLUTIONS, directions, like, precision_of, values
from multigrad.testing.mismatches import relative


class Tolerance:
    """How far numbers may be apart, and how far an element is moved, in a precision."""

    def __init__(self, precision: str, rtol: float | None, atol: float | None) -> None:
        eps = RESOLUTIONS[precision]
        self.precision = precision
        self.rounding = 5.0 * eps ** (2 / 3)
        self.noise = (4.0 if eps < 1e-4 else 2.0) * eps  # in half precision, more would hide too much
        """What rounding leaves of a gradient that is zero, as a share of what cancels in it."""
        self.step = eps ** (1 / 3)
        self.rtol = max(1e-4, self.rounding) if rtol is None else rtol
        self._atol = atol

    def error(self, size: Any, length: Any) -> Any:
        """What rounding may do to a difference of this length, of an output of this size, or of these."""
        return self.rounding * self.step / length * size  # 5 * eps * size / length

    def atol(self, error: Any, gradient: float) -> Any:
        """The absolute tolerance for numbers with this error, or these.

        `gradient` is the size of the largest gradient: another one may be what is left of such numbers.
        """
        return error + self.noise * gradient if self._atol is None else self._atol


def size_of(*arrays: np.ndarray) -> float:
    """The size of the largest finite number in arrays."""
    return max([float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) for a in arrays], default=0.0)


def precision(function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> str:
    """The dtype of the fewest digits in which a function of `inputs` computes."""
    lowest = precision_of([*inputs, *function(*inputs)])
    # On a way that is long for an element close to zero, `log` bends by itself.
    if lowest == "float64" and all(_roughness(function, inputs, least) > 1e-10 for least in (1.0, 0.0)):
        return "float32"
    return lowest


def _roughness(function: Callable[..., Sequence[Any]], inputs: Sequence[Any], least: float) -> float:
    """How far a function is from a parabola on so short a way that only rounding to float32 can bend it.

    It is relative to the size of an output: about 1e-12 where all is float64, and 1e-7 where something on
    the way is float32. A parabola, as `log` bends on that way, too. The way is a share of each element, or of
    `least` where that is larger; without a `least` it may be too short for a change, and the answer infinite.
    """
    most = 0.0
    middle = [values(output) for output in function(*inputs)]
    for length in (1.0, 1.7, 2.6):
        once, twice = [
            [_there(function, inputs, way * length, least) for way in (times, -times)] for times in (1.0, 2.0)
        ]
        for high, low, higher, lower, between in zip(*once, *twice, middle, strict=True):
            if not least and (high == low).any():
                return float("inf")
            with np.errstate(all="ignore"):
                rest = np.abs((higher + lower - 2.0 * between) - 4.0 * (high + low - 2.0 * between))
            size = size_of(between)
            most = max(
                most, relative(np.max(rest, where=np.isfinite(rest), initial=0.0), size) if size else 0.0
            )
    return most


def _there(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any], length: float, least: float
) -> list[np.ndarray]:
    """The outputs so far along one way through the inputs, on which quotients of these change, too."""
    moved = [
        x + length * RESOLUTIONS["float32"] * np.maximum(least, np.abs(x)) * np.real(direction) / 2.0
        for x, direction in zip(map(values, inputs), directions(inputs, seed=3), strict=True)
    ]
    return [values(output) for output in function(*like(moved, inputs))]
