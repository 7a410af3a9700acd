"""The probable cause of a wrong gradient: how it differs from the right one everywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multigrad.testing.checked_function import CheckedFunction
from multigrad.testing.differences import CentralDifference, Rounding, estimate
from multigrad.testing.mismatches import disagree

_CLOSE = 1e-3
"""The relative difference of gradients that count as equal. Rules that are 1 % off have another cause."""

_CLEAR = 10.0
"""A derivative that is larger than this multiple of its error shows a ratio."""


@dataclass(frozen=True)
class Compared:
    """The gradient of one output with respect to one argument, by the rule and by differences.

    Arguments:
        name, shape: the name and the shape of the argument.
        elements: the elements that were compared.
        rule, differences: their derivatives.
        errors: the absolute errors that are allowed.
    """

    name: str
    shape: tuple[int, ...]
    elements: Sequence[tuple[int, ...]]
    rule: np.ndarray
    differences: np.ndarray
    errors: np.ndarray

    def is_wrong(self, rtol: float) -> np.ndarray:
        """Return where the gradient differs from the differences, or these are not finite."""
        return disagree(self.rule, self.differences, rtol, self.errors) | ~np.isfinite(self.differences)

    def is_rule(self, gradient: np.ndarray) -> bool:
        """Return whether the rule returns this gradient, and the gradient is not zero."""
        error = self.errors + _CLOSE * np.abs(gradient)
        is_close = np.abs(self.rule - gradient) <= error
        return bool(is_close.all() and (np.abs(gradient) > _CLEAR * self.errors).any())


def probable_cause(
    flat: CheckedFunction,
    labels: tuple[str, ...],
    compared: Mapping[tuple[str, ...], Compared],
    weights: Sequence[np.ndarray],
    rounding: Rounding,
) -> str | None:
    """Return the probable cause of a wrong gradient, or None if no cause is found.

    Arguments:
        flat: the function.
        labels: the names of the output and of the argument.
        compared: the gradients of all outputs with respect to all arguments.
        weights, rounding: the weights of the outputs, and the rounding errors of the weighted outputs.
    """
    output, argument = labels
    wrong = compared[labels]
    if not (np.isfinite(wrong.rule).all() and np.isfinite(wrong.differences).all()):
        return None
    k, i = flat.output_names.index(output), flat.input_names.index(argument)
    shape = weights[k].shape
    others = [compared[output, name] for name in flat.input_names if name != argument]
    shapes = [shape, *[tuple(tensor.shape) for tensor in flat.inputs]]
    causes = _find_exchange(wrong, others) or _find_factor(wrong, shapes) or _find_rearrangement(wrong)
    if causes is None and shape[:1] > (1,):
        differences = [CentralDifference(flat, flat.inputs, i, e, weights, rounding) for e in wrong.elements]
        return _find_row(wrong, k, differences)
    return causes


def _find_exchange(wrong: Compared, others: Sequence[Compared]) -> str | None:
    """Return that the gradient is the one of another argument."""
    for other in others:
        if other.shape == wrong.shape and wrong.is_rule(other.differences):
            if other.is_rule(wrong.differences):
                return f"the gradients of {wrong.name} and {other.name} are exchanged"
            return f"the gradient of {wrong.name} is that of {other.name}"
    return None


def _ratio(wrong: Compared) -> Any:
    """Return the ratio of the gradient to the right one if it is the same number everywhere."""
    clear = np.abs(wrong.differences) > _CLEAR * wrong.errors
    if not clear.any():
        return None
    if (np.abs(wrong.rule) <= wrong.errors).all():
        return 0.0
    ratio = np.median(np.real(wrong.rule[clear] / wrong.differences[clear]))
    is_simple = any(abs(n * ratio - np.rint(n * ratio)) < _CLOSE * abs(n * ratio) for n in (1, 2, 3, 4))
    return ratio if wrong.is_rule(ratio * wrong.differences) and (clear.sum() > 1 or is_simple) else None


def _find_factor(wrong: Compared, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Return a cause for a gradient that is the right one times a number, such as the size of an output."""
    ratio = _ratio(wrong)
    if ratio is None:
        return None
    if ratio == 0.0:
        return f"the gradient of {wrong.name} is zero everywhere, as of stop_gradient"
    text = f"the gradient of {wrong.name} is {ratio:.4g} times the right one"
    sizes = {size for shape in shapes for size in (*shape, int(np.prod(shape))) if size > 2}
    for size in sorted(sizes):
        if abs(ratio / size - 1.0) < _CLOSE:
            return f"{text}: a sum over {size} elements is extra, or a mean is missing"
        if abs(ratio * size - 1.0) < _CLOSE:
            return f"{text}: a sum over {size} elements is missing, or a mean is extra"
    return f"{text} everywhere"


def _find_rearrangement(wrong: Compared) -> str | None:
    """Return that the gradient is a transpose or a sum of the right one."""
    if len(wrong.elements) < np.prod(wrong.shape):
        return None
    right = wrong.differences.reshape(wrong.shape)
    is_square = right.ndim > 1 and right.shape[-1] == right.shape[-2]
    if is_square and wrong.is_rule(np.swapaxes(right, -1, -2).ravel()):
        return f"the gradient of {wrong.name} is the transpose of the right one"
    for axis in range(right.ndim):
        total = np.broadcast_to(right.sum(axis, keepdims=True), right.shape)
        if right.shape[axis] > 1 and wrong.is_rule(total.ravel()):
            return f"a sum is extra: the gradient of {wrong.name} is summed over its axis {axis}"
    total = np.broadcast_to(right.sum(), right.shape)
    return f"a sum over {wrong.name} is extra" if wrong.is_rule(total.ravel()) else None


def _find_row(wrong: Compared, k: int, differences: Sequence[CentralDifference]) -> str | None:
    """Return a cause for a gradient that is the one of the first or of the last row of the output."""
    for row in (0, -1):
        masked = [0.0 * weight for weight in differences[0].weights]
        masked[k][row] = differences[0].weights[k][row]
        of_row = [estimate(replace(difference, weights=masked)).derivatives[k] for difference in differences]
        if wrong.is_rule(np.array(of_row)):
            return f"a sum over the batch is missing: the gradient of {wrong.name} is that of one row"
    return None
