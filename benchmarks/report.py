"""Show results as tables, and store them as JSON and as a figure."""

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console
from rich.table import Table

from .growth import Curve
from .measure import Timing

IMPLEMENTATIONS = ("native", "multigrad", "keras", "plain")

Timings = Mapping[str, Mapping[str, Mapping[str, Timing]]]
"""Timings by mode, case and implementation."""

Memory = Mapping[str, Mapping[str, float]]
"""Memory by case and implementation."""


def print_tables(timings: Timings, memory: Memory) -> None:
    """Print a table for each mode, and one for memory."""
    console = Console()
    for mode, cases in timings.items():
        unit = "µs, ratio to native (of processor time), and half the interquartile range in %"
        table = Table(title=f"{keras.backend.backend()}, {mode}: {unit}")
        table.add_column("case")
        for name in IMPLEMENTATIONS:
            table.add_column(name, justify="right")
        for case, implementations in cases.items():
            table.add_row(case, *[_cell(implementations.get(name), name) for name in IMPLEMENTATIONS])
        console.print(table)
    if memory:
        table = Table(title="memory kept between the passes, in sizes of the input")
        names = list(dict.fromkeys(name for sizes in memory.values() for name in sizes))
        table.add_column("case")
        for name in names:
            table.add_column(name, justify="right")
        for case, sizes in memory.items():
            table.add_row(case, *[f"{sizes[name]:.2f}" if name in sizes else "-" for name in names])
        console.print(table)


def _cell(timing: Timing | None, implementation: str) -> str:
    if timing is None:
        return "-"
    spread = 50.0 * (timing.high - timing.low) / timing.median
    ratio = "" if implementation == "native" else f"  {timing.ratio:.2f}x ({timing.processor:.2f})"
    return f"{timing.median:.1f}{ratio}  ±{spread:.0f}%"


def as_dict(timings: Timings, memory: Memory, curves: Sequence[Curve]) -> dict[str, Any]:
    """Return all results, and the versions they belong to, as data that JSON can store."""
    return {
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "microseconds": {
            mode: {
                case: {name: dataclasses.asdict(timing) for name, timing in implementations.items()}
                for case, implementations in cases.items()
            }
            for mode, cases in timings.items()
        },
        "memory": memory,
        "growth": [dataclasses.asdict(curve) for curve in curves],
    }


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write results to a JSON file."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def draw(timings: Timings, curves: Sequence[Curve], path: Path) -> None:
    """Draw the ratios to native and the growth of time."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 1 + len(curves), figsize=(5 + 3.6 * len(curves), 4.2), layout="constrained"
    )
    axes = list(axes) if curves else [axes]
    _draw_ratios(axes[0], timings["eager"])
    for axis, curve in zip(axes[1:], curves, strict=True):
        for name, times in curve.times.items():
            axis.plot(curve.sizes, times, "o-", label=name)
        axis.set(xlabel=curve.axis, ylabel="µs, forward and backward", xscale="log", yscale="log")
        axis.set_xticks(curve.sizes, [str(size) for size in curve.sizes])
        axis.set_xticks([], minor=True)
        axis.legend(frameon=False)
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(f"{keras.backend.backend()}, eager, forward and backward")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ratios(axis: Any, cases: Mapping[str, Mapping[str, Timing]]) -> None:
    styles = [("multigrad", "o", "C0", -0.12), ("keras", "s", "C1", 0.12)]
    for name, marker, color, shift in styles:
        rows = [i for i, timings in enumerate(cases.values()) if name in timings]
        ratios = [timings[name].ratio for timings in cases.values() if name in timings]
        axis.plot(ratios, [row + shift for row in rows], marker, color=color, label=name)
    axis.axvline(1.0, color="0.4", linewidth=1, label="native")
    axis.axvline(1.05, color="0.4", linewidth=1, linestyle=":", label="1.05")
    axis.set(yticks=range(len(cases)), yticklabels=list(cases), xlabel="time relative to native")
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    axis.grid(alpha=0.3, axis="x")
