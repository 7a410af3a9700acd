"""What the demo expects of a backend's measurements, and the table that shows both."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Measurements = dict[str, Any]
"""What one backend measured: numbers and lists of numbers, by the keys of `SECTIONS`."""


@dataclass(frozen=True)
class Row:
    """One measured quantity: how it is called and shown, and what is expected of it."""

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


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


def _number_row(key: str, label: str, expected: float) -> Row:
    def is_right(value: float) -> bool:
        return value == expected or (math.isnan(expected) and math.isnan(value))

    return Row(key, label, _number(expected), is_right, _number)


def _list_row(key: str, label: str, expected: list[float]) -> Row:
    return Row(key, label, _numbers(expected), lambda values: values == expected, _numbers)


# Every exact number must be hit to the last bit, so that backends which pass agree with each other too.
# Training draws other random numbers on each backend: its accuracy has a threshold.
SECTIONS = {
    "log1pexp(100)": (
        _number_row("log1pexp.value", "value (exp(100) is over float32)", math.inf),
        _number_row("log1pexp.plain", "gradient, plain autodiff", math.nan),
        _number_row("log1pexp.rule", "gradient, by the rule", 1.0),
    ),
    "square(square(square(2)))": (
        _number_row("chain.value", "value", 256.0),
        _number_row("chain.gradient", "gradient", 1024.0),
        _list_row("chain.x", "steps back: x", [16.0, 4.0, 2.0]),
        _list_row("chain.upstream", "            upstream", [1.0, 32.0, 256.0]),
        _list_row("chain.current", "          × current, 2x", [32.0, 8.0, 4.0]),
        _list_row("chain.downstream", "          = downstream", [32.0, 256.0, 1024.0]),
    ),
    "digits, 3-bit activations": (
        Row("digits.accuracy", "test accuracy", "at least 95 %", lambda value: value >= 0.95, _percent),
        Row("digits.levels", "levels of a hidden activation", "2 to 8", lambda value: 2 <= value <= 8, str),
        Row("digits.moved", "change of the weights below it", "over 0", lambda value: value > 0, _percent),
        Row("digits.seconds", "time", "", lambda value: True, _seconds),
    ),
}


def problems_of(measured: Mapping[str, Measurements]) -> list[str]:
    """Each measurement that is not as expected, in words.

    One reads `jax: square(square(square(2))), gradient: 1000, expected 1024`.

    Arguments:
        measured: the measurements of each backend.
    """
    return [
        f"{backend}: {title}, {_in_words(row, measurements[row.key])}"
        for backend, measurements in measured.items()
        for title, rows in SECTIONS.items()
        for row in rows
        if not row.is_right(measurements[row.key])
    ]


def _in_words(row: Row, value: Any) -> str:
    return f"{row.label.lstrip(' ×=')}: {row.show(value)}, expected {row.expected}"


def show(measured: Mapping[str, Measurements]) -> None:
    """Print the measurements of each backend side by side, beside what was expected."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    for heading in ("expected", *measured):
        table.add_column(heading, overflow="fold")  # a wrong answer may be long: it is never cut
    for title, rows in SECTIONS.items():
        table.add_row()
        table.add_row(f"[bold]{title}[/bold]")
        for row in rows:
            cells = [_cell(row, measurements[row.key]) for measurements in measured.values()]
            table.add_row(f"  {row.label}", row.expected, *cells)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100  # a file or a pipe has no width: keep the columns whole
    console.print(table)
    console.print()


def _cell(row: Row, value: Any) -> str:
    text = row.show(value)
    return text if row.is_right(value) else f"[red]{text} ✗[/red]"
