"""Central differences of a function, and their rounding errors.

A central difference `(f(x + h) - f(x - h)) / (2 * h)` has a truncation error of `O(h**2)` and a rounding
error of `O(eps / h)`. Their sum is smallest for a step `h` of about `eps ** (1/3)`, here times the larger of
1 and the element. The extrapolation `(4 * near - far) / 3`, where `far` has the double step, has a truncation
error of `O(h**4)` (Richardson; Press et al., Numerical Recipes, section 5.7). If
the two differences are far apart, the step was too long, and a step relative to the smaller of 1 and the
element is used.

The constants of `Tolerance` follow from this. If `f` rounds `k` times, the error of its values is at most
`k * eps / 2 * f`. The error of the difference is `k * eps / 2 * f / h`, and that of the extrapolation is 1.5
times larger. The factor 5 in `Tolerance.rounding` corresponds to `k = 6`. Rounding errors of the elements of
an output are independent, so the size of an output is the root of its sum of squares. The same holds for
terms that cancel in an output, as in `x - mean(x)`. Rounding of the moved argument adds no error, because the
difference is divided by the distance of the rounded arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from multigrad.testing.mismatches import disagree
from multigrad.testing.precision import EPSILON, Tolerance
from multigrad.testing.tensors import to_numpy, to_tensors

Function = Callable[..., Sequence[Any]]
"""A function of flat tensors."""

_TOO_FAR = 0.05
"""The longest step that is doubled. In half precision, the double step may leave a function's domain."""

_MIN_SPACINGS = 100.0
"""The shortest step, in multiples of the distance between adjacent floating-point numbers."""

_STEADY = 0.02
"""The largest relative deviation of two differences whose extrapolation is accurate to `rtol`."""


class Estimate(NamedTuple):
    """The derivative of each weighted output with respect to one element, and its rounding error."""

    derivatives: list[Any]
    errors: list[float]


class _Quotients(NamedTuple):
    """Difference quotients of the weighted outputs, and norms of the outputs, which bound the errors."""

    derivatives: list[Any]
    sizes: list[float]
    """The norm of each output."""
    moved_sizes: list[float]
    """The norm of each output, restricted to the elements that changed."""


@dataclass(frozen=True)
class CentralDifference:
    """Central differences of a function with respect to one element of one input.

    Arguments:
        function, inputs: the function and its inputs.
        index, element: the index of the input, and the index of the element in this input.
        weights: an array for each output. Each output is reduced to its weighted sum.
    """

    function: Function
    inputs: Sequence[Any]
    index: int
    element: tuple[int, ...]
    weights: Sequence[np.ndarray]

    def __call__(self, length: float) -> _Quotients:
        """Return the quotients for a step of this length. A complex element is moved along 1 and along 1j."""
        derivatives, sizes, moved_sizes = [], [], []
        is_complex = np.iscomplexobj(to_numpy(self.inputs[self.index]))
        for direction in (1.0, 1j) if is_complex else (1.0,):
            (high, up), (low, down) = (self._move(sign * length * direction) for sign in (1.0, -1.0))
            distance = abs(high - low)  # the step after rounding
            ends = list(zip(self.weights, up, down, strict=True))
            sizes.append([_size(w, a, b) for w, a, b in ends])
            moved_sizes.append([_size(w, a, b, a != b) for w, a, b in ends])
            with np.errstate(invalid="ignore", over="ignore"):
                derivatives.append(
                    [direction * np.sum(np.real(np.conj(w) * (a - b))) / distance for w, a, b in ends]
                )
        return _Quotients(
            [sum(parts) for parts in zip(*derivatives, strict=True)],
            [max(parts) for parts in zip(*sizes, strict=True)],
            [max(parts) for parts in zip(*moved_sizes, strict=True)],
        )

    def _move(self, step: complex) -> tuple[Any, list[np.ndarray]]:
        """Return the element after a step, and the outputs there."""
        inputs = list(self.inputs)
        array = to_numpy(inputs[self.index])
        array[self.element] += step
        (inputs[self.index],) = to_tensors([array], inputs[self.index : self.index + 1])
        outputs = self.function(*inputs)
        return to_numpy(inputs[self.index])[self.element], [to_numpy(output) for output in outputs]


def _size(weight: np.ndarray, up: np.ndarray, down: np.ndarray, where: Any = True) -> float:
    """Return the norm of a weighted output, with the larger of the values at both ends for each element."""
    with np.errstate(all="ignore"):
        sizes = np.abs(weight) * np.maximum(np.abs(up), np.abs(down))
        return float(np.linalg.norm(np.where(where, sizes, 0.0)))


def first_step(tolerance: Tolerance, size: float) -> float:
    """Return the length of the step that is tried first for an element of this magnitude."""
    return tolerance.step * max(1.0, size)


def estimate(difference: CentralDifference, number: float, precision: str, tolerance: Tolerance) -> Estimate:
    """Estimate derivatives by extrapolation.

    Arguments:
        difference: the differences of the element.
        number: the value of the element.
        precision: the dtype of the input.
        tolerance: the tolerances and steps.
    """
    size = abs(number)
    extrapolated, is_steady = _extrapolate(difference, tolerance, first_step(tolerance, size))
    # The first step is too long, for example, for `log` near zero, and for `cos` of a large number.
    shorter = tolerance.step * min(1.0, size)
    if is_steady or size in (0.0, 1.0) or shorter < _MIN_SPACINGS * size * EPSILON[precision]:
        return extrapolated
    return _extrapolate(difference, tolerance, shorter)[0]


def estimate_linear(difference: CentralDifference, tolerance: Tolerance) -> Estimate:
    """Return derivatives with respect to an input that the outputs are linear in, and that is zero.

    A step of 1 has no truncation error.
    """
    derivatives, sizes, _ = difference(1.0)
    return Estimate(derivatives, [tolerance.rounding * size for size in sizes])


def _extrapolate(difference: CentralDifference, tolerance: Tolerance, length: float) -> tuple[Estimate, bool]:
    """Return the extrapolation from steps of `length` and `2 * length`, and whether the two are close.

    In half precision the double step is too long. Then the result is the difference of the single step.
    """
    near, near_sizes, _ = difference(length)
    if tolerance.step > _TOO_FAR:
        return Estimate(near, [tolerance.error(size, length) for size in near_sizes]), True
    far, far_sizes, moved_sizes = difference(2.0 * length)
    errors = [tolerance.error(max(pair), length) for pair in zip(near_sizes, far_sizes, strict=True)]
    is_steady = not any(
        disagree(np.asarray(a), np.asarray(b), _STEADY, tolerance.error(size, length)).any()
        for a, b, size in zip(near, far, moved_sizes, strict=True)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        return Estimate([(4.0 * a - b) / 3.0 for a, b in zip(near, far, strict=True)], errors), is_steady
