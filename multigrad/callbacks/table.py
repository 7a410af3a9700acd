"""`GradientLogger.table`: the statistics of one step as text."""

from rich.table import Table

from multigrad.callbacks.records import GradientRecord, GradientStatistics
from multigrad.callbacks.records import Table as Statistics
from multigrad.tracing.table import format_number, render

_COLUMNS = ("norm", "largest", "zeros", "upstream norm", "largest", "zeros")


def format_record(record: GradientRecord) -> str:
    """Format the layers, then the weights, with one row for each."""
    lines = [f"step {record.step}"]
    if record.outputs:
        lines += ["", _format("output of", _COLUMNS, record.outputs, record.upstream)]
    columns = [column.replace("upstream", "gradient") for column in _COLUMNS]
    return "\n".join([*lines, "", _format("weight", columns, record.weights, record.gradients)])


def _format(
    title: str, columns: tuple[str, ...] | list[str], values: Statistics, gradients: Statistics
) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right")
    for name, statistics in values.items():
        gradient = gradients.get(name)
        cells = ("no gradient", "", "") if gradient is None else _cells(gradient)
        table.add_row(name, *_cells(statistics), *cells)
    return render(table)


def _cells(statistics: GradientStatistics) -> tuple[str, str, str]:
    bad = [f"{_percent(share)} {word}" for share, word in _bad(statistics) if share]
    largest = format_number(statistics.largest)
    return format_number(statistics.norm), ", ".join([largest, *bad]), _percent(statistics.zeros)


def _bad(statistics: GradientStatistics) -> tuple[tuple[float, str], ...]:
    return (statistics.nans, "NaN"), (statistics.infinities, "Inf")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
