"""Where numbers disagree, as plain text: for messages, which have no colours and no width."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from multigrad.errors import message

SHOWN = 10
"""How many disagreements a message shows."""

GRADIENT = "gradient of "
"""How the name of a gradient begins, before that of its argument."""


@dataclass(frozen=True)
class Unlike:
    """Numbers at one place that should be one number, and by how much they differ."""

    place: tuple[str, ...]
    element: tuple[int, ...]
    numbers: tuple[Any, ...]

    def apart(self) -> float:
        """The largest relative difference from the last number."""
        *others, last = self.numbers
        if not np.isfinite(self.numbers).all():
            return float("inf")
        return max(relative(abs(other - last), abs(last)) for other in others)

    def where(self) -> str:
        """The last part of the place, with the element."""
        return self.place[-1] + element_text(self.element)


def relative(difference: float, size: float) -> float:
    """A difference as a share of a size; infinite as that of zero."""
    return float(difference / size) if size else (float("inf") if difference else 0.0)


def disagree(left: np.ndarray, right: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """Where two arrays disagree, NaN among them; `right` is what `rtol` is relative to."""
    with np.errstate(invalid="ignore"):
        return ~(np.abs(left - right) <= atol + rtol * np.abs(right))


def places(where: np.ndarray) -> list[tuple[int, ...]]:
    """The places of an array in which something is true."""
    return [tuple(int(i) for i in place) for place in np.argwhere(where)]


def element_text(element: Sequence[int]) -> str:
    """An element as it is indexed; nothing for a scalar."""
    return f"[{', '.join(map(str, element))}]" if element else ""


def number_text(number: Any) -> str:
    """A number with as many digits as tell 0.1 % apart, and more."""
    if np.iscomplexobj(number):
        return str(complex(number)) if not np.isfinite(number) else f"{complex(number):.6g}"
    return f"{float(number):.9g}"


def in_words(numbers: Iterable[Any]) -> str:
    """What is wrong with numbers that are not finite: `NaN`, `infinite`; empty where they are."""
    array = np.asarray(list(numbers))
    if np.isnan(array).any():
        return "NaN"
    return "infinite" if np.isinf(array).any() else ""


def table(headings: Sequence[str], found: Sequence[Unlike]) -> str:
    """A table of what disagrees, the worst first, with two spaces before each line."""
    ordered = sorted(found, key=Unlike.apart, reverse=True)
    rows = [tuple(headings)]
    for unlike in ordered[:SHOWN]:
        element = element_text(unlike.element)
        rows.append((*unlike.place, element, *map(number_text, unlike.numbers), f"{unlike.apart():.2g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if len(ordered) > SHOWN:
        lines.append(f"and {len(ordered) - SHOWN} more")
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def fail(
    name: str,
    problem: str,
    worst: Unlike,
    required: str,
    got: str,
    mend: str,
    headings: Sequence[str],
    unlike: list[Unlike],
    count: int,
) -> NoReturn:
    __tracebackhide__ = True
    said = message(name, problem, argument=worst.where(), required=required, got=got, mend=mend)
    raise AssertionError(f"{said}\n{len(unlike)} of {count} disagree:\n{table(headings, unlike)}")
