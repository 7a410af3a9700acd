"""The dtype that limits the precision of a function, and the tolerances that follow from it."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from multigrad import backend
from multigrad.ops.dtypes import EPSILON, REAL_DTYPES


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
    dtypes = _real_dtypes([keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors])
    return max(["float64", *dtypes], key=EPSILON.__getitem__)


def largest_magnitude(*arrays: np.ndarray) -> float:
    """Return the largest absolute value of a finite element in arrays, 0 if there is none."""
    return max([float(np.max(np.abs(a), where=np.isfinite(a), initial=0.0)) for a in arrays], default=0.0)


def detect_precision(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any], name: str
) -> tuple[str, str]:
    """Return the least precise dtype in which a function computes, and the reason if it is not float64.

    Intermediate results count, except if the framework cannot trace the function. `name` is in the reason.
    """
    found = [("float64", ""), (lowest_precision(inputs), f"{name} has an input of this dtype")]
    for operands, results in backend.active.operations(function, inputs) or ():
        wide = min(_real_dtypes(operands), key=EPSILON.__getitem__, default="bfloat16")
        narrow = [dtype for dtype in _real_dtypes(results) if EPSILON[wide] < EPSILON[dtype]]
        found += [(dtype, f"an operation of {name} converts {wide} to {dtype}") for dtype in narrow]
    found.append((lowest_precision(function(*inputs)), f"{name} has an output of this dtype"))
    return max(found, key=lambda pair: EPSILON[pair[0]])


def _real_dtypes(names: Sequence[str]) -> list[str]:
    """Return the real dtypes of floating and complex dtypes."""
    dtypes = [REAL_DTYPES.get(name, name) for name in names]
    return [dtype for dtype in dtypes if dtype in EPSILON]
