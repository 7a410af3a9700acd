"""What was measured, as a table, as a file and as a picture."""

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

WAYS = ("native", "multigrad", "keras", "plain")
Results = Mapping[str, Mapping[str, Mapping[str, Timing]]]
"""By mode, case and way."""


def show(results: Results, memory: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table for each mode, and one of the memory."""
    console = Console()
    for mode, cases in results.items():
        what = "µs, times native (by processor time), and the middle half in %"
        table = Table(title=f"{keras.backend.backend()}, {mode}: {what}")
        table.add_column("case")
        for way in WAYS:
            table.add_column(way, justify="right")
        for case, ways in cases.items():
            table.add_row(case, *[_cell(ways.get(way), way) for way in WAYS])
        console.print(table)
    if memory:
        table = Table(title="held between the passes, in sizes of the input")
        ways = list(dict.fromkeys(way for held in memory.values() for way in held))
        for name in ("case", *ways):
            table.add_column(name, justify="left" if name == "case" else "right")
        for case, held in memory.items():
            table.add_row(case, *[f"{held[way]:.2f}" if way in held else "-" for way in ways])
        console.print(table)


def _cell(timing: Timing | None, way: str) -> str:
    if timing is None:
        return "-"
    spread = 50.0 * (timing.high - timing.low) / timing.median
    ratio = "" if way == "native" else f"  {timing.ratio:.2f}x ({timing.processor:.2f})"
    return f"{timing.median:.1f}{ratio}  ±{spread:.0f}%"


def as_dict(
    results: Results, memory: Mapping[str, Mapping[str, float]], curves: Sequence[Curve]
) -> dict[str, Any]:
    """All of it for programs."""
    modes = {
        mode: {case: {way: dataclasses.asdict(t) for way, t in ways.items()} for case, ways in cases.items()}
        for mode, cases in results.items()
    }
    return {
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "microseconds": modes,
        "held": memory,
        "growth": [dataclasses.asdict(curve) for curve in curves],
    }


def save(found: Mapping[str, Any], path: Path) -> None:
    """Write the file."""
    path.write_text(json.dumps(found, indent=1) + "\n")


def draw(results: Results, curves: Sequence[Curve], path: Path) -> None:
    """The ratios to native, and the curves of growth."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 1 + len(curves), figsize=(5 + 3.6 * len(curves), 4.2), layout="constrained"
    )
    axes = [axes] if not curves else list(axes)
    _draw_ratios(axes[0], results["eager"])
    for axis, curve in zip(axes[1:], curves, strict=True):
        for way, times in curve.times.items():
            axis.plot(curve.places, times, "o-", label=way)
        axis.set(xlabel=curve.axis, ylabel="µs, forward and backward", xscale="log", yscale="log")
        axis.set_xticks(curve.places, [str(place) for place in curve.places])
        axis.set_xticks([], minor=True)
        axis.legend(frameon=False)
        axis.grid(alpha=0.3, which="both")
    figure.suptitle(f"{keras.backend.backend()}, eager, forward and backward")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ratios(axis: Any, cases: Mapping[str, Mapping[str, Timing]]) -> None:
    places = range(len(cases))
    ways = [("multigrad", "o", "C0"), ("keras", "s", "C1")]
    for shift, (way, marker, colour) in zip((-0.12, 0.12), ways, strict=True):
        own = [(i + shift, c[way]) for i, c in zip(places, cases.values(), strict=True) if way in c]
        axis.plot([t.ratio for _, t in own], [i for i, _ in own], marker, color=colour, label=way)
    axis.axvline(1.0, color="0.4", linewidth=1, label="by hand")
    axis.axvline(1.05, color="0.4", linewidth=1, linestyle=":", label="1.05")
    axis.set(yticks=list(places), yticklabels=list(cases), xlabel="time, in times of that by hand")
    axis.invert_yaxis()
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    axis.grid(alpha=0.3, axis="x")
