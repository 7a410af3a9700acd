"""`str(trace)`: the first NaN or Inf, a table with one row per step, and warnings."""

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from multigrad.tracing.diagnosis import diagnose, flag_lines
from multigrad.tracing.records import CallRecord, StepRecord, Values, summarize

COLUMNS = ("call", "x", "output", "upstream", "current", "downstream")
_WIDTH = 10_000  # wide enough that rich never wraps or truncates a row


def format_table(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> str:
    """Format the steps in their order, then the calls that received no gradient, then all flags."""
    if not calls:
        return "No op was called in this trace. trace_gradients(model) records layers, too."
    with_gradient = {step.call for step in steps}
    pairs: list[tuple[CallRecord, StepRecord | None]] = [(step.call, step) for step in steps]
    pairs += [(call, None) for call in calls if call not in with_gradient]
    table = render(COLUMNS, [row for call, step in pairs for row in _rows(call, step)])
    first = diagnose(calls, steps)
    flags = list(flag_lines(calls, steps))
    return "\n".join([*first, *([""] if first else []), table, *([""] if flags else []), *flags])


def render(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text. The first column is aligned on the left, and the others on the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _rows(call: CallRecord, step: StepRecord | None) -> Iterator[Sequence[str]]:
    """Yield a row for each pair of an input and an output, and at least one row."""
    title = call.title if call.within is None else f"{call.title}, in {call.within}"
    pairs = list(zip_longest(call.inputs, call.outputs)) or [(None, None)]
    for row, (input_path, output_path) in enumerate(pairs):
        x = _cell(call.inputs, input_path, with_path=len(call.inputs) > 1)
        y = _cell(call.outputs, output_path, with_path=len(call.outputs) > 1)
        gradients = ("", "", "")
        if step is not None:
            current = step.current.get(input_path) if input_path is not None else None
            gradients = (
                _cell(step.upstream, output_path),
                "" if current is None else format_number(current),
                _cell(step.downstream, input_path),
            )
        elif row == 0:
            gradients = ("no gradient", "", "")
        yield title if row == 0 else "", x, y, *gradients


def _cell(values: Values, path: str | None, with_path: bool = False) -> str:
    if path is None or path not in values:
        return ""
    text = format_value(values, path)
    return f"{path}: {text}" if with_path else text


def format_value(values: Values, path: str, compact: bool = False) -> str:
    """Format a scalar as its number, and other arrays as lines of shape, mean, largest value and zeros.

    With `compact`, an array is one line with its shape, and its largest value or its NaN and Inf.
    """
    array = values[path]
    if array is None:
        return "none"
    summary = summarize(array)
    if summary.value is not None:
        return format_number(summary.value)
    largest = [] if summary.largest is None else [f"largest {format_number(summary.largest)}"]
    counts = [f"{n} {word}" for word, n in (("NaN", summary.nans), ("Inf", summary.infinities)) if n]
    if compact:
        return "  ".join([str(summary.shape), *(counts or largest)])
    of = " of the finite" if counts else ""
    mean = [] if summary.mean is None else [f"mean{of} {format_number(summary.mean)}"]
    zeros = [] if summary.zeros is None else [f"{100 * summary.zeros:.3g} % zeros"]
    return "\n".join([str(summary.shape), *mean, *largest, *counts, *zeros])


def format_number(number: float | complex) -> str:
    """Format a number with 4 significant digits, or 6 if it is complex."""
    return f"{number:.6g}" if isinstance(number, complex) else f"{number:.4g}"
