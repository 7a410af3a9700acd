"""A trace as a table of text: the gradient's way back, a step a row."""

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from multigrad.tracing.records import Call, Step, Values, summary_of

COLUMNS = ("call", "x", "output", "upstream", "current", "downstream")
_WIDTH = 10_000  # nothing is ever broken or cut: whoever shows the text may do so


def table_of(calls: Sequence[Call], steps: Sequence[Step]) -> str:
    """The steps in their order, and then the calls to which no gradient came."""
    if not calls:
        return "No op was called in this trace."
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(COLUMNS[0])
    for column in COLUMNS[1:]:
        table.add_column(column, justify="right")
    reached = {id(step.of) for step in steps}
    rest = [call for call in calls if id(call) not in reached]
    for step in steps:
        _add_rows(table, step.of, step)
    for call in rest:
        _add_rows(table, call, None)
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    flags = list(_flag_lines(calls, steps))
    return "\n".join([*lines, *([""] if flags else []), *flags])


def _flag_lines(calls: Sequence[Call], steps: Sequence[Step]) -> Iterator[str]:
    for call in calls:
        yield from (f"{call.title}: {flag}" for flag in call.flags)
    for step in steps:
        yield from (f"{step.of.title}: {flag}" for flag in step.flags)


def _add_rows(table: Table, call: Call, step: Step | None) -> None:
    """A row for each tensor among inputs and outputs: in most calls, that is one. One where there is none."""
    title = call.title if call.within is None else f"{call.title}, in {call.within}"
    rows = list(zip_longest(call.inputs, call.outputs)) or [(None, None)]
    for place, (path, output) in enumerate(rows):
        x = _cell(call.inputs, path, named=len(call.inputs) > 1)
        y = _cell(call.outputs, output, named=len(call.outputs) > 1)
        back = ("", "", "")
        if step is not None:
            current = step.current.get(path)
            back = (
                _cell(step.upstream, output),
                "" if current is None else number_text(current),
                _cell(step.downstream, path),
            )
        elif not place:
            back = ("no gradient", "", "")
        table.add_row("" if place else title, x, y, *back)


def _cell(values: Mapping[str, Any], path: str | None, named: bool = False) -> str:
    if path is None:
        return ""
    text = value_text(values, path)
    return f"{path}: {text}" if named else text


def value_text(values: Values, path: str) -> str:
    """A scalar's number; else shape, mean, largest absolute value and share of zeros, a line each."""
    array = values[path]
    if array is None:
        return "none"
    summary = summary_of(array)
    if summary.value is not None:
        return number_text(summary.value)
    lines = [str(summary.shape)]
    if summary.mean is not None:
        lines.append(f"mean {number_text(summary.mean)}")
    if summary.largest is not None:
        lines.append(f"largest {number_text(summary.largest)}")
    if summary.zeros is not None:
        lines.append(f"{100 * summary.zeros:.3g} % zeros")
    return "\n".join(lines)


def number_text(number: float | complex) -> str:
    """A number in a few characters."""
    return f"{number:.6g}" if isinstance(number, complex) else f"{number:.4g}"
