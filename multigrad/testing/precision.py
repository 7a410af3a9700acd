"""The dtype that limits the precision of a function, and the tolerances that follow from it."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from multigrad.testing.mismatches import relative_to
from multigrad.testing.tensors import random_weights, to_numpy, to_tensors

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next larger number of each dtype."""

_REAL_DTYPES = {"complex64": "float32", "complex128": "float64"}


class Tolerance:
    """The tolerances and the step of differences for a precision. `testing/differences.py` derives them.

    Arguments:
        precision: the dtype that limits the precision.
        rtol, atol: the user's tolerances, which replace the default ones.
    """

    def __init__(self, precision: str, rtol: float | None, atol: float | None) -> None:
        eps = EPSILON[precision]
        self.precision = precision
        self.step = eps ** (1 / 3)
        """The step of a difference, relative to the larger of 1 and the element."""
        self.rounding = 5.0 * eps ** (2 / 3)
        """The rounding error of a difference of that step, relative to the output."""
        self.noise = (4.0 if eps < 1e-4 else 2.0) * eps  # a larger factor would hide faults in half precision
        """The rounding error of a gradient whose terms cancel to zero, relative to the terms."""
        self.rtol = max(1e-4, self.rounding) if rtol is None else rtol
        self._atol = atol

    def error(self, size: Any, length: Any) -> Any:
        """Return the rounding error of differences with steps `length`, of outputs of magnitude `size`."""
        return self.rounding * self.step / length * size  # 5 * eps * size / length

    def atol(self, error: Any, gradient: float) -> Any:
        """Return the absolute tolerance for numbers with the rounding error `error`.

        `gradient` is the largest magnitude of all gradients, whose terms may cancel to a small gradient.
        """
        return error + self.noise * gradient if self._atol is None else self._atol


def lowest_precision(tensors: Sequence[Any]) -> str:
    """Return the least precise real dtype among tensors, float64 if no tensor is floating or complex."""
    names = [keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors]
    dtypes = [_REAL_DTYPES.get(name, name) for name in names]
    return max(["float64", *[dtype for dtype in dtypes if dtype in EPSILON]], key=EPSILON.__getitem__)


def largest_magnitude(*arrays: np.ndarray) -> float:
    """Return the largest absolute value of a finite element in arrays, 0 if there is none."""
    return max([float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) for a in arrays], default=0.0)


def detect_precision(function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> str:
    """Return the least precise dtype in which a function computes, including intermediate results.

    A function with float64 inputs and outputs may compute in float32 in between. Its outputs then change in
    visible jumps when its inputs change by less than float32 resolves.
    """
    lowest = lowest_precision([*inputs, *function(*inputs)])
    # Two scales, because near 0 a step relative to 1 is so long that `log` is not close to a parabola.
    if lowest == "float64" and all(_roughness(function, inputs, scale) > 1e-10 for scale in (1.0, 0.0)):
        return "float32"
    return lowest


def _roughness(function: Callable[..., Sequence[Any]], inputs: Sequence[Any], min_scale: float) -> float:
    """Return how far a function is from a parabola on a step so short that only rounding can cause it.

    The result is relative to the output: about 1e-12 if the function computes in float64, and 1e-7 if some
    intermediate result is float32. A parabola is subtracted because functions such as `log` curve even on
    this step. The step is relative to the larger of each element and `min_scale`. With a `min_scale` of 0 the
    step may be too short to change the output; then the result is infinite.
    """
    roughness = 0.0
    middle = [to_numpy(output) for output in function(*inputs)]
    for length in (1.0, 1.7, 2.6):
        near, far = [
            [_outputs_at(function, inputs, sign * length * steps, min_scale) for sign in (1.0, -1.0)]
            for steps in (1.0, 2.0)
        ]
        for high, low, higher, lower, center in zip(*near, *far, middle, strict=True):
            if not min_scale and (high == low).any():
                return float("inf")
            with np.errstate(all="ignore"):  # zero for a parabola
                rest = np.abs((higher + lower - 2.0 * center) - 4.0 * (high + low - 2.0 * center))
            size = largest_magnitude(center)
            largest = np.max(rest, where=np.isfinite(rest), initial=0.0)
            roughness = max(roughness, relative_to(largest, size) if size else 0.0)
    return roughness


def _outputs_at(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any], length: float, min_scale: float
) -> list[np.ndarray]:
    """Return the outputs after a move of all inputs, by different amounts, so that quotients change, too."""
    moved = [
        x + length * EPSILON["float32"] * np.maximum(min_scale, np.abs(x)) * np.real(weight) / 2.0
        for x, weight in zip(map(to_numpy, inputs), random_weights(inputs, seed=3), strict=True)
    ]
    return [to_numpy(output) for output in function(*to_tensors(moved, inputs))]
