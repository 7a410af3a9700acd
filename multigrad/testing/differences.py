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

Terms may also cancel inside a function: the gradient of `tanh(x)` is `1 - tanh(x) ** 2`. For a large `x`, the
gradient is small, but its error is still `eps`. `Rounding` therefore takes two more numbers. `measure_noise`
measures the errors of the outputs beside the arguments, so a fault at the arguments does not count as
rounding. The outputs of a derivative of order 1 or higher count as no smaller than the outputs of the
function that was differentiated: where terms cancel completely, the outputs do not change, and no error can
be measured.

At a kink, such as that of `relu` at zero, the derivatives on the two sides differ, and every number between
them is a subgradient. Both come from differences of second order,
`(4 * f(x + h / 2) - f(x + h) - 3 * f(x)) / h`. At a jump, there is no derivative.

The truncation error of the extrapolation is at most a third of the difference between `near` and `far`: it is
4/15 of it if the error of fourth order dominates, and less if that of second order does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from multigrad.ops.dtypes import EPSILON
from multigrad.testing.mismatches import disagree
from multigrad.testing.precision import Tolerance, lowest_precision
from multigrad.testing.tensors import random_weights, to_numpy, to_tensors

Function = Callable[..., Sequence[Any]]
"""A function of flat tensors."""

_TOO_FAR = 0.05
"""The longest step that is doubled. In half precision, the double step may leave a function's domain."""

_MIN_SPACINGS = 100.0
"""The shortest step, in multiples of the distance between adjacent floating-point numbers."""

_STEADY = 0.02
"""The largest relative deviation of two differences whose extrapolation is accurate to `rtol`."""

_TRUNCATION = 1.0 / 3.0
"""The truncation error of an extrapolation, relative to the deviation of its two differences."""

DEVIATIONS = 8.0
"""The largest rounding error, in standard deviations."""

_LINES = (1.0 / 64.0, -1.0 / 100.0)
"""The steps on the two lines on which rounding is measured, relative to that of a difference.

They are on different sides of the inputs. Their steps differ, because the errors may repeat with the steps of
one line.
"""

_SHORT = 1.0 / 64.0
"""The step that shows a jump, relative to that of a difference."""


class Estimate(NamedTuple):
    """The derivative of each weighted output with respect to one element, its error, and the step."""

    derivatives: list[Any]
    errors: list[float]
    length: float


class _Quotients(NamedTuple):
    """Difference quotients of the weighted outputs, and norms of the outputs, which bound the errors."""

    derivatives: list[Any]
    sizes: list[float]
    """The norm of each output."""
    moved_sizes: list[float]
    """The norm of each output, restricted to the elements that changed."""


@dataclass(frozen=True)
class Rounding:
    """The rounding errors of the weighted outputs of a function.

    Arguments:
        tolerance: the tolerances of its precision.
        noise: for each output, the standard deviation of its error close to the arguments.
        terms: the size of terms that may cancel in the outputs.
    """

    tolerance: Tolerance
    noise: Sequence[float]
    terms: float

    def errors(self, sizes: Sequence[float], length: float) -> list[float]:
        """Return the errors of differences with steps of this length, of outputs of these norms."""
        return [
            self.tolerance.error(max(size, self.terms), length) + DEVIATIONS * noise / length
            for size, noise in zip(sizes, self.noise, strict=True)
        ]


@dataclass(frozen=True)
class CentralDifference:
    """Central differences of a function with respect to one element of one input.

    Arguments:
        function, inputs: the function and its inputs.
        index, element: the index of the input, and the index of the element in this input.
        weights: an array for each output. Each output is reduced to its weighted sum.
        rounding: the rounding errors of these sums.
    """

    function: Function
    inputs: Sequence[Any]
    index: int
    element: tuple[int, ...]
    weights: Sequence[np.ndarray]
    rounding: Rounding

    def __call__(self, length: float) -> _Quotients:
        """Return the quotients for a step of this length. A complex element is moved along 1 and along 1j."""
        derivatives, sizes, moved_sizes = [], [], []
        for direction in self._directions():
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

    def nearest_derivative(self, k: int, central: Estimate, gradient: Any, error: float) -> Any:
        """Return the derivative of output `k` that is closest to a gradient, or None where the output jumps.

        It is the central difference, or a number between the derivatives on both sides if one of them differs
        from it by more than its error: at a kink, or where the second derivative jumps.
        """
        low, high, jump = self._one_sided(k, central.length)
        if jump > error:
            return None
        deviations = np.abs(np.array([low, high]) - central.derivatives[k])
        if not (np.isfinite(deviations).all() and deviations.max() > error):
            return central.derivatives[k]
        real, imaginary = (np.clip(part(gradient), part(low), part(high)) for part in (np.real, np.imag))
        return real + 1j * imaginary if np.iscomplexobj(gradient) else real

    def _one_sided(self, k: int, length: float) -> tuple[Any, Any, float]:
        """Return bounds of the derivatives of output `k` on both sides, and the quotient of its jump.

        The bounds are sums of the smaller and of the larger derivative of each element of the output, because
        each has a kink of its own.
        """
        low, high, jump, weight = 0.0, 0.0, 0.0, self.weights[k]
        shares = (0.0, _SHORT, 0.5, 1.0, -_SHORT, -0.5, -1.0)
        for direction in self._directions():
            at, *moved = (self._move(share * length * direction)[1][k] for share in shares)
            slopes = []
            with np.errstate(invalid="ignore", over="ignore"):
                for short, near, far in (moved[:3], moved[3:]):
                    slopes.append(np.real(np.conj(weight) * (4.0 * near - far - 3.0 * at)) / length)
                    is_jump = np.abs(short - at) > 0.5 * np.abs(far - at)
                    jump = max(jump, _size(weight, short - at, 0.0 * at, is_jump) / (2.0 * length))
                low += direction * np.sum(np.minimum(slopes[0], -slopes[1]))
                high += direction * np.sum(np.maximum(slopes[0], -slopes[1]))
        return low, high, jump

    def _directions(self) -> tuple[complex, ...]:
        return (1.0, 1j) if np.iscomplexobj(to_numpy(self.inputs[self.index])) else (1.0,)

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


def measure_noise(function: Function, inputs: Sequence[Any], tolerance: Tolerance) -> list[np.ndarray]:
    """Return the standard deviation of the rounding error of each element of each output.

    It is measured beside the inputs, because the function may differ from its surroundings at the inputs.
    """
    lines = [_noise_on_line(function, inputs, tolerance.step * share) for share in _LINES]
    return [np.maximum(*pair) for pair in zip(*lines, strict=True)]


def noise_of_sums(noise: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> list[float]:
    """Return the standard deviation of the rounding error of each weighted output."""
    return [float(np.linalg.norm(np.abs(w) * n)) for w, n in zip(weights, noise, strict=True)]


def _noise_on_line(function: Function, inputs: Sequence[Any], length: float) -> list[np.ndarray]:
    """Return the standard deviation of the errors on a line on which a smooth function is a parabola.

    All inputs move, in steps of this length. The fourth difference of independent errors has 70 times their
    variance (Moré and Wild, Estimating Computational Noise, 2011).
    """
    steps = [
        _spaced(x, length * direction) for x, direction in zip(inputs, random_weights(inputs, 3), strict=True)
    ]
    points = []
    for position in range(1, 10):
        moved = [to_numpy(x) + position * step for x, step in zip(inputs, steps, strict=True)]
        points.append([to_numpy(output) for output in function(*to_tensors(moved, inputs))])
    noise = []
    with np.errstate(all="ignore"):
        for values in zip(*points, strict=True):
            differences = np.abs(np.diff(np.stack(values), n=4, axis=0))
            deviations = np.sqrt(np.mean(differences**2, axis=0) / 70.0)
            noise.append(np.where(np.isfinite(deviations), deviations, 0.0))
    return noise


def _spaced(tensor: Any, step: np.ndarray) -> np.ndarray:
    """Return a step for each element: a multiple of the spacing of floating-point numbers of its size.

    Then the moved elements are not rounded, except close to a power of two.
    """
    sizes = np.abs(to_numpy(tensor))
    sizes = np.where((sizes > 0.0) & np.isfinite(sizes), sizes, 1.0)
    spacing = EPSILON[lowest_precision([tensor])] * 2.0 ** np.floor(np.log2(sizes))
    return spacing * np.rint(np.minimum(1.0, sizes) * np.real(step) / spacing)


def first_step(tolerance: Tolerance, size: float) -> float:
    """Return the length of the step that is tried first for an element of this magnitude."""
    return tolerance.step * max(1.0, size)


def estimate(difference: CentralDifference) -> Estimate:
    """Estimate derivatives by extrapolation."""
    tensor = difference.inputs[difference.index]
    size, tolerance = abs(to_numpy(tensor)[difference.element]), difference.rounding.tolerance
    extrapolated, is_steady = _extrapolate(difference, first_step(tolerance, size))
    # The first step is too long, for example, for `log` near zero, and for `cos` of a large number.
    shorter, spacing = tolerance.step * min(1.0, size), size * EPSILON[lowest_precision([tensor])]
    if is_steady or size in (0.0, 1.0) or shorter < _MIN_SPACINGS * spacing:
        return extrapolated
    return _extrapolate(difference, shorter)[0]


def estimate_linear(difference: CentralDifference) -> Estimate:
    """Return derivatives at zero, with respect to an input that the outputs are linear in.

    A step of 1 has no truncation error.
    """
    inputs, i = list(difference.inputs), difference.index
    inputs[i : i + 1] = to_tensors([0.0 * to_numpy(inputs[i])], inputs[i : i + 1])
    derivatives, sizes, _ = replace(difference, inputs=inputs)(1.0)
    rounding = difference.rounding
    errors = rounding.errors([0.0] * len(sizes), 1.0)
    relative = rounding.tolerance.rounding
    errors = [error + relative * size for error, size in zip(errors, sizes, strict=True)]
    return Estimate(derivatives, errors, 1.0)


def _extrapolate(difference: CentralDifference, length: float) -> tuple[Estimate, bool]:
    """Return the extrapolation from steps of `length` and `2 * length`, and whether the two are close.

    In half precision the double step is too long. Then the result is the difference of the single step.
    """
    rounding = difference.rounding
    near, near_sizes, _ = difference(length)
    if rounding.tolerance.step > _TOO_FAR:
        return Estimate(near, rounding.errors(near_sizes, length), length), True
    far, far_sizes, moved_sizes = difference(2.0 * length)
    with np.errstate(invalid="ignore", over="ignore"):
        deviations = [float(abs(a - b)) for a, b in zip(near, far, strict=True)]
        extrapolated = [(4.0 * a - b) / 3.0 for a, b in zip(near, far, strict=True)]
    is_steady = not any(
        disagree(np.asarray(a), np.asarray(b), _STEADY, rounding.tolerance.error(size, length)).any()
        for a, b, size in zip(near, far, moved_sizes, strict=True)
    )
    errors = rounding.errors([max(pair) for pair in zip(near_sizes, far_sizes, strict=True)], length)
    errors = [e + _TRUNCATION * d for e, d in zip(errors, deviations, strict=True)]
    return Estimate(extrapolated, errors, length), is_steady
