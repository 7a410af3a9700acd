"""The expected results of the demo, and the table that compares measurements with them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Measurements = dict[str, Any]
"""The measurements of one backend: numbers and lists of numbers, by the keys of the rows in `SECTIONS`."""


@dataclass(frozen=True)
class Quantity:
    """One measured quantity, which is a row of the table.

    Arguments:
        key: its key in the measurements.
        label, expected: the first two cells of the row.
        is_right: returns whether a measurement is as expected.
        show: formats a measurement.
    """

    key: str
    label: str
    expected: str
    is_right: Callable[[Any], bool]
    show: Callable[[Any], str]


def _number(value: float) -> str:
    return f"{value:g}"


def _numbers(values: list[float]) -> str:
    return ", ".join(map(_number, values))


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _number_row(key: str, label: str, expected: float) -> Quantity:
    def is_right(value: float) -> bool:
        return value == expected or (math.isnan(expected) and math.isnan(value))

    return Quantity(key, label, _number(expected), is_right, _number)


def _list_row(key: str, label: str, expected: list[float]) -> Quantity:
    return Quantity(key, label, _numbers(expected), lambda values: values == expected, _numbers)


# Exact results must match to the last bit, so the backends also agree with each other. The accuracy has a
# threshold, because each backend trains with its own random numbers.
SECTIONS = {
    "log1pexp(100)": (
        _number_row("log1pexp.value", "value (exp(100) overflows float32)", math.inf),
        _number_row("log1pexp.plain", "gradient, plain autodiff", math.nan),
        _number_row("log1pexp.rule", "gradient, by the rule", 1.0),
    ),
    "square(square(square(2)))": (
        _number_row("chain.value", "value", 256.0),
        _number_row("chain.gradient", "gradient", 1024.0),
        _list_row("chain.x", "backward: x", [16.0, 4.0, 2.0]),
        _list_row("chain.upstream", "          upstream", [1.0, 32.0, 256.0]),
        _list_row("chain.current", "        × current, 2x", [32.0, 8.0, 4.0]),
        _list_row("chain.downstream", "        = downstream", [32.0, 256.0, 1024.0]),
    ),
    "digits, 3-bit activations": (
        Quantity("digits.accuracy", "test accuracy", "at least 95 %", lambda value: value >= 0.95, _percent),
        Quantity(
            "digits.levels", "distinct hidden activations", "2 to 8", lambda value: 2 <= value <= 8, str
        ),
        Quantity("digits.moved", "change of the first kernel", "over 0", lambda value: value > 0, _percent),
    ),
}


def find_problems(measured: Mapping[str, Measurements]) -> list[str]:
    """Return a message for each measurement that is not as expected.

    An example is `jax: square(square(square(2))), gradient: 1000, expected 1024`.

    Arguments:
        measured: the measurements of each backend.
    """
    return [
        f"{backend}: {title}, {_describe(row, measurements[row.key])}"
        for backend, measurements in measured.items()
        for title, rows in SECTIONS.items()
        for row in rows
        if not row.is_right(measurements[row.key])
    ]


def _describe(row: Quantity, value: Any) -> str:
    return f"{row.label.lstrip(' ×=')}: {row.show(value)}, expected {row.expected}"


def print_table(measured: Mapping[str, Measurements]) -> None:
    """Print a table of the expected results and the measurements of each backend."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    for heading in ("expected", *measured):
        table.add_column(heading, overflow="fold")  # never truncate a wrong result
    for title, rows in SECTIONS.items():
        table.add_row()
        table.add_row(f"[bold]{title}[/bold]")
        for row in rows:
            cells = [_cell(row, measurements[row.key]) for measurements in measured.values()]
            table.add_row(f"  {row.label}", row.expected, *cells)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100  # a file or a pipe has no width
    console.print(table)
    console.print()


def _cell(row: Quantity, value: Any) -> str:
    text = row.show(value)
    return text if row.is_right(value) else f"[red]{text} ✗[/red]"
