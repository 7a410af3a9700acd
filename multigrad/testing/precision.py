"""How many digits a function has, and how far numbers may be apart for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multigrad.testing.flat import RESOLUTIONS, directions, like, precision_of, values
from multigrad.testing.table import relative


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

    def atol(self, size: Any, gradient: float) -> Any:
        """The absolute tolerance for differences of an output of this size, or of these.

        `gradient` is the size of the largest gradient: another one may be what is left of such numbers.
        """
        return self.rounding * size + self.noise * gradient if self._atol is None else self._atol


def size_of(*arrays: np.ndarray) -> float:
    """The size of the largest finite number in arrays."""
    return max([float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) for a in arrays], default=0.0)


def precision(inputs: Sequence[Any], *functions: Callable[..., Sequence[Any]]) -> str:
    """The dtype of the fewest digits in which functions of `inputs` compute."""
    lowest = precision_of([*inputs, *[output for function in functions for output in function(*inputs)]])
    if lowest == "float64" and any(_roughness(function, inputs) > 1e-10 for function in functions):
        return "float32"
    return lowest


def _roughness(function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> float:
    """How far a function is from a parabola on so short a way that only rounding to float32 can bend it.

    It is relative to the size of an output: about 1e-12 where all is float64, and 1e-7 where something on
    the way is float32. A parabola, as `log` close to zero bends on that way, too.
    """
    most = 0.0
    middle = [values(output) for output in function(*inputs)]
    for length in (1.0, 1.7, 2.6):
        bends = [_bends(function, inputs, middle, times * length) for times in (1.0, 2.0)]
        for once, twice, between in zip(*bends, middle, strict=True):
            with np.errstate(all="ignore"):
                rest = np.abs(twice - 4.0 * once)
            size = np.max(np.abs(between), where=np.isfinite(between), initial=0.0)
            most = max(
                most, relative(np.max(rest, where=np.isfinite(rest), initial=0.0), size) if size else 0.0
            )
    return most


def _bends(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any], middle: Sequence[np.ndarray], length: float
) -> list[np.ndarray]:
    """The second differences of the outputs along one way through the inputs."""
    ends = []
    for way in (length, -length):
        moved = [
            x + way * RESOLUTIONS["float32"] * np.maximum(1.0, np.abs(x)) * np.sign(np.real(direction))
            for x, direction in zip(map(values, inputs), directions(inputs, seed=3), strict=True)
        ]
        ends.append([values(output) for output in function(*like(moved, inputs))])
    with np.errstate(all="ignore"):
        return [high + low - 2.0 * between for high, low, between in zip(*ends, middle, strict=True)]
