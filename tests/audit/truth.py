"""The derivatives of a case from its formulas and from finite differences of its values in float64.

One-sided differences find the points without a derivative. There, any number between the one-sided
derivatives is valid, and the table states which one multigrad returns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from audit.cases import Case

_FIRST_STEP, _SECOND_STEP = 1e-4, 1e-3
_SMOOTH = 1e-4
"""One-sided derivatives that differ by less are equal, relative to the largest."""

Values = Callable[..., np.ndarray]
"""The values of a case in float64: one number for each point."""


class Truth(NamedTuple):
    """The derivative with respect to each element. All arrays have the shape (elements, points)."""

    value: np.ndarray
    """The derivative, or the convention. NaN if any finite number is valid."""
    low: np.ndarray
    high: np.ndarray
    """The bounds of the valid numbers, which are equal where there is a derivative."""
    is_choice: np.ndarray
    """Whether there is no derivative, so that the value is a convention."""


def first_derivative(case: Case, values: Values) -> Truth:
    """Return the first derivatives."""
    known = _known_values(case, "first")
    if known is not None and not np.isnan(known).any():
        return _exact(known)
    left, right = (_one_sided(case, values, sign) for sign in (-1.0, 1.0))
    left, right = np.where(np.isnan(left), right, left), np.where(np.isnan(right), left, right)
    size = np.nanmax(np.abs(np.stack([left, right, np.ones_like(left)])), axis=0)
    with np.errstate(invalid="ignore"):
        is_choice = ~(np.abs(left - right) <= _SMOOTH * size)
        value = np.where(is_choice, np.nan, 0.5 * (left + right))
    low = np.where(is_choice, np.where(np.isnan(left), -np.inf, np.minimum(left, right)), value)
    high = np.where(is_choice, np.where(np.isnan(left), np.inf, np.maximum(left, right)), value)
    choice = _known_values(case, "choice")
    if choice is not None:
        # A stated convention also holds where the differences are symmetric, and where they diverge.
        stated = ~np.isnan(choice)
        value = np.where(stated, choice, value)
        low = np.where(stated, np.fmin(low, choice), low)
        high = np.where(stated, np.fmax(high, choice), high)
        is_choice = is_choice | stated
    if known is not None:
        stated = ~np.isnan(known)
        value, low, high = (np.where(stated, known, a) for a in (value, low, high))
        is_choice = is_choice & ~stated
    return Truth(value, low, high, is_choice)


def second_derivative(case: Case, values: Values, first: Truth) -> Truth:
    """Return the products of the second derivatives with the direction of the case."""
    known = _known_values(case, "second")
    if known is not None and not np.isnan(known).any() and not first.is_choice.any():
        return _exact(known)
    coarse, fine = (_mixed_differences(case, values, step) for step in (_SECOND_STEP, 0.5 * _SECOND_STEP))
    value = (4.0 * fine - coarse) / 3.0
    with np.errstate(invalid="ignore"):
        smooth = np.abs(fine - coarse) <= 1e-2 * (1.0 + np.abs(fine))
    is_choice = first.is_choice if case.elementwise else first.is_choice.any() | first.is_choice
    smooth &= np.isfinite(first.value)
    value = np.where(is_choice, 0.0, np.where(smooth, value, np.nan))
    if known is not None:
        value = np.where(np.isnan(known), value, known)
    # At a point without a second derivative, a function of the table is linear on one side, with the second
    # derivative 0, or has no second derivative on this side.
    low, high = (np.where(is_choice, bound(value, 0.0), value) for bound in (np.fmin, np.fmax))
    return Truth(value, low, high, is_choice)


def value_calls(case: Case) -> int:
    """Return the approximate number of values that the finite differences of a case compute."""
    moves = len(case.args) if case.elementwise else sum(arg.size for arg in case.args)
    return moves * (14 if 2 in case.orders else 6)


def direction(case: Case) -> list[np.ndarray]:
    """Return the direction of the second derivative, for each argument."""
    if case.elementwise:
        return [np.full(arg.shape, (1.0, 0.5, -0.25)[i]) for i, arg in enumerate(case.args)]
    return [np.cos(1.0 + 2.0 * i + np.arange(arg.size)).reshape(arg.shape) for i, arg in enumerate(case.args)]


def _exact(value: np.ndarray) -> Truth:
    return Truth(value, value, value, np.zeros(value.shape, bool))


def _known_values(case: Case, item: str) -> np.ndarray | None:
    """Return what the table states, with NaN where it states nothing."""
    columns = [getattr(known, item) for known in case.known]
    if all(column is None for column in columns):
        return None
    count = len(case.args) if case.elementwise else sum(arg.size for arg in case.args)
    return np.stack([_flat(column, case, count) for column in columns], axis=-1)


def _flat(value: Any, case: Case, count: int) -> np.ndarray:
    if value is None:
        return np.full(count, np.nan)
    if isinstance(value, (int, float)):
        return np.full(count, float(value))
    if case.elementwise or len(case.args) == 1:
        return np.asarray(value, "float64").reshape(count)
    parts = [
        np.broadcast_to(np.asarray(part, "float64"), arg.shape).ravel()
        for part, arg in zip(value, case.args, strict=True)
    ]
    return np.concatenate(parts)


def _moves(case: Case) -> list[list[np.ndarray]]:
    """Return the unit vectors: one per argument of an elementwise case, else one per element."""
    moves = []
    for index, arg in enumerate(case.args):
        ones = [np.ones(arg.shape)] if case.elementwise else np.eye(arg.size).reshape(-1, *arg.shape)
        zeros = [np.zeros(a.shape) for a in case.args]
        moves += [[*zeros[:index], one, *zeros[index + 1 :]] for one in ones]
    return moves


def _scale(case: Case, move: list[np.ndarray], step: float) -> list[np.ndarray]:
    """Return the steps, in proportion to the arguments."""
    sizes = [np.where(np.isfinite(arg), np.maximum(1.0, np.abs(arg)), 1.0) for arg in case.args]
    largest = np.max(sizes, axis=0) if case.elementwise else max(map(np.max, sizes))
    return [step * largest * m for m in move]


def _one_sided(case: Case, values: Values, sign: float) -> np.ndarray:
    """Return the one-sided derivatives. A difference that does not converge is NaN or infinite."""
    base, found = values(*case.args), []
    for move in _moves(case):
        slopes = []
        for step in (_FIRST_STEP, 0.5 * _FIRST_STEP, 0.25 * _FIRST_STEP):
            steps = _scale(case, move, sign * step)
            moved = values(*(arg + s for arg, s in zip(case.args, steps, strict=True)))
            length = sum(np.sum(s) if not case.elementwise else s for s in steps)
            slopes.append((moved - base) / length)
        with np.errstate(invalid="ignore"):
            extrapolated = 2.0 * slopes[1] - slopes[0]
            again = 2.0 * slopes[2] - slopes[1]
            converges = np.abs(extrapolated - again) <= 1e-3 * (1.0 + np.abs(again))
        found.append(np.where(converges, again, np.where(np.isnan(again), np.nan, np.sign(again) * np.inf)))
    return np.stack(found)


def _mixed_differences(case: Case, values: Values, step: float) -> np.ndarray:
    """Return the mixed second differences along the direction of the case."""
    along, found = direction(case), []
    other = _scale(case, along, step)
    for move in _moves(case):
        one = _scale(case, move, step)
        total = np.zeros(())
        for i in (1.0, -1.0):
            for j in (1.0, -1.0):
                parts = zip(case.args, one, other, strict=True)
                total = total + i * j * values(*(arg + i * a + j * b for arg, a, b in parts))
        size = _scale(case, [np.ones(arg.shape) for arg in case.args], step)[0]
        found.append(total / (4.0 * np.square(size if case.elementwise else np.max(size))))
    return np.stack(found)
