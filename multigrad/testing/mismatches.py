"""Elements that disagree, and the plain-text table of them that error messages contain."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from multigrad.common.errors import message

_MAX_LINE = 120
"""The number of characters in the longest line of a message."""

MAX_ROWS = 10
"""The number of mismatches that a table shows."""

GRADIENT_PREFIX = "gradient of "
"""The name of a gradient is this prefix and the name of its argument."""


@dataclass(frozen=True)
class Mismatch:
    """Numbers that should agree and do not, at one element of an array.

    Arguments:
        labels: the first cells of the row in the table, such as the output and the argument.
        element: the index of the element.
        numbers: the numbers; the last of them is the reference.
    """

    labels: tuple[str, ...]
    element: tuple[int, ...]
    numbers: tuple[Any, ...]

    def relative_difference(self) -> float:
        """Return the largest relative difference from the last number, infinity for NaN and infinity."""
        *others, reference = self.numbers
        if not np.isfinite(self.numbers).all():
            return float("inf")
        return max(relative_to(abs(number - reference), abs(reference)) for number in others)

    def location(self) -> str:
        """Return the last label with the index of the element, such as `'x'[1, 0]`."""
        return self.labels[-1] + format_element(self.element)


def worst_of(mismatches: Iterable[Mismatch]) -> Mismatch:
    """Return the mismatch with the largest relative difference."""
    return max(mismatches, key=Mismatch.relative_difference)


def relative_to(difference: float, size: float) -> float:
    """Return `difference / size`, where `0 / 0` is 0."""
    return float(difference / size) if size else (float("inf") if difference else 0.0)


def disagree(numbers: np.ndarray, reference: np.ndarray, rtol: float, atol: Any) -> np.ndarray:
    """Return where numbers differ from a reference by more than the tolerance. NaN always disagrees."""
    with np.errstate(invalid="ignore"):
        return ~(np.abs(numbers - reference) <= atol + rtol * np.abs(reference))


def find_mismatches(
    labels: tuple[str, ...], numbers: np.ndarray, reference: np.ndarray, rtol: float, atol: Any
) -> list[Mismatch]:
    """Return the elements of an array that disagree with a reference. NaN agrees with NaN."""
    is_same = (np.isnan(numbers) & np.isnan(reference)) | (numbers == reference)
    is_wrong = disagree(numbers, reference, rtol, atol) & ~is_same
    return [Mismatch(labels, e, (numbers[e], reference[e])) for e in true_elements(is_wrong)]


def true_elements(mask: np.ndarray) -> list[tuple[int, ...]]:
    """Return the indices of the true elements of a mask."""
    return [tuple(int(i) for i in element) for element in np.argwhere(mask)]


def format_element(element: Sequence[int]) -> str:
    """Format the index of an element as `[1, 0]`. The index of a scalar is an empty string."""
    return f"[{', '.join(map(str, element))}]" if element else ""


def format_number(number: Any) -> str:
    """Format a real number with 9 digits, and a complex number with 6."""
    if np.iscomplexobj(number):
        return str(complex(number)) if not np.isfinite(number) else f"{complex(number):.6g}"
    return f"{float(number):.9g}"


def name_not_finite(numbers: Iterable[Any]) -> str:
    """Return "NaN" or "infinite" if a number is one, and an empty string if all numbers are finite."""
    array = np.asarray(list(numbers))
    if np.isnan(array).any():
        return "NaN"
    return "infinite" if np.isinf(array).any() else ""


def format_table(headings: Sequence[str], mismatches: Sequence[Mismatch]) -> str:
    """Format mismatches as an indented table, sorted from the largest relative difference."""
    ordered = sorted(mismatches, key=Mismatch.relative_difference, reverse=True)
    rows = [tuple(headings)]
    for mismatch in ordered[:MAX_ROWS]:
        element = format_element(mismatch.element)
        numbers = map(format_number, mismatch.numbers)
        rows.append((*mismatch.labels, element, *numbers, f"{mismatch.relative_difference():.2g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ordered) > MAX_ROWS:
        lines.append(f"and {len(ordered) - MAX_ROWS} more")
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def raise_mismatches(
    name: str,
    problem: str,
    required: str,
    got: str,
    fix: str,
    headings: Sequence[str],
    mismatches: list[Mismatch],
    count: int,
    probably: str | None = None,
) -> NoReturn:
    """Raise an AssertionError with the worst of the mismatches, and a table of them.

    Arguments:
        name, problem, required, got, fix: the parts of the message. `required` and `got` follow the two
            numbers of the worst mismatch.
        headings: the headings of the table.
        mismatches: the mismatches among `count` elements.
        probably: the probable cause, if it is known.
    """
    __tracebackhide__ = True
    if probably is not None:
        probably = textwrap.shorten(probably, _MAX_LINE - len("  probably: "), placeholder="...")
    worst = worst_of(mismatches)
    numbers = [format_number(number) for number in worst.numbers]
    text = message(
        name,
        problem,
        argument=worst.location(),
        required=f"{numbers[1]}{required}",
        got=f"{numbers[0]}{got}",
        probably=probably,
        fix=fix,
    )
    table = format_table(headings, mismatches)
    raise AssertionError(f"{text}\n{len(mismatches)} of {count} elements disagree:\n{table}")
