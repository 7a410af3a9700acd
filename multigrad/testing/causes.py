"""The probable cause of a wrong gradient: how it differs from the right one everywhere."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

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

    def is_rule(self, gradient: np.ndarray) -> bool:
        """Return whether the rule returns this gradient, and the gradient is not zero."""
        error = self.errors + _CLOSE * np.abs(gradient)
        is_close = np.abs(self.rule - gradient) <= error
        return bool(is_close.all() and (np.abs(gradient) > _CLEAR * self.errors).any())

    def by_element(self) -> np.ndarray | None:
        """Return the differences in the shape of the argument, None if only some elements were compared."""
        is_complete = len(self.elements) == np.prod(self.shape)
        return self.differences.reshape(self.shape) if is_complete else None


def probable_cause(
    wrong: Compared,
    others: Sequence[Compared],
    sizes: Sequence[int],
    rows: Sequence[Callable[[], np.ndarray]],
) -> str | None:
    """Return what is probably wrong with a gradient, None if nothing can be told.

    Arguments:
        wrong: the wrong gradient.
        others: the gradients of the same output with respect to the other arguments.
        sizes: the sizes of the output and of the arguments, and of their axes.
        rows: functions that return the differences of one row of the output.
    """
    if not (np.isfinite(wrong.rule).all() and np.isfinite(wrong.differences).all()):
        return None
    name, ratio = wrong.name, _ratio(wrong)
    exchanged = _exchanged(wrong, others)
    if exchanged or ratio is not None:
        return exchanged or _explain_ratio(name, ratio, sizes)
    by_element = wrong.by_element()
    rearranged = None if by_element is None else _rearranged(wrong, by_element)
    if rearranged is None and any(wrong.is_rule(differences()) for differences in rows):
        return f"a sum over the batch is missing: the gradient of {name} is that of one row of the output"
    return rearranged


def _exchanged(wrong: Compared, others: Sequence[Compared]) -> str | None:
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


def _explain_ratio(name: str, ratio: float, sizes: Sequence[int]) -> str:
    if ratio == 0.0:
        return f"the gradient of {name} is zero everywhere, as of stop_gradient"
    text = f"the gradient of {name} is {ratio:.4g} times the right one"
    for size in sorted({size for size in sizes if size > 2}):
        if abs(ratio / size - 1.0) < _CLOSE:
            return f"{text}: a sum over {size} elements is extra, or a mean is missing"
        if abs(ratio * size - 1.0) < _CLOSE:
            return f"{text}: a sum over {size} elements is missing, or a mean is extra"
    return f"{text} everywhere"


def _rearranged(wrong: Compared, right: np.ndarray) -> str | None:
    """Return how the gradient is a transpose or a sum of the right one."""
    is_square = right.ndim > 1 and right.shape[-1] == right.shape[-2]
    if is_square and wrong.is_rule(np.swapaxes(right, -1, -2).ravel()):
        return f"the gradient of {wrong.name} is the transpose of the right one"
    for axis in range(right.ndim):
        total = np.broadcast_to(right.sum(axis, keepdims=True), right.shape)
        if right.shape[axis] > 1 and wrong.is_rule(total.ravel()):
            return f"a sum is extra: the gradient of {wrong.name} is summed over its axis {axis}"
    total = np.broadcast_to(right.sum(), right.shape)
    return f"a sum over {wrong.name} is extra" if wrong.is_rule(total.ravel()) else None
