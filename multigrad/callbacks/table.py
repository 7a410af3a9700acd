"""`GradientLogger.table`: the statistics of one step as text."""

from collections.abc import Sequence

from multigrad.callbacks.records import GradientRecord, GradientStatistics
from multigrad.callbacks.records import Table as Statistics
from multigrad.tracing.table import format_number, render


def format_record(record: GradientRecord) -> str:
    """Format the layers, then the weights, with one row for each."""
    lines = [f"step {record.step}"]
    if record.outputs:
        columns = ("output of", "norm", "largest", "zeros", "upstream norm", "largest", "zeros")
        lines += ["", _format(columns, record.outputs, record.upstream)]
    columns = ("weight", "norm", "largest", "zeros", "gradient norm", "largest", "zeros")
    return "\n".join([*lines, "", _format(columns, record.weights, record.gradients)])


def _format(columns: Sequence[str], values: Statistics, gradients: Statistics) -> str:
    rows = []
    for name, statistics in values.items():
        gradient = gradients.get(name)
        rows.append((name, *_cells(statistics), *(_cells(gradient) if gradient else ("no gradient", "", ""))))
    return render(columns, rows)


def _cells(statistics: GradientStatistics) -> tuple[str, str, str]:
    shares = ((statistics.nans, "NaN"), (statistics.infinities, "Inf"))
    bad = [f"{_percent(share)} {word}" for share, word in shares if share]
    largest = format_number(statistics.largest)
    return format_number(statistics.norm), ", ".join([largest, *bad]), _percent(statistics.zeros)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
