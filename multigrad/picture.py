"""A trace as a picture: the calls one below the other, values down on the left, gradients up on the right."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad.errors import message
from multigrad.flow import Call, Step, Values, largest_of
from multigrad.table import number_text, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _BOX = "#263238", "#90a4ae", "#eceff1"
_WRONG, _NONE = "#d32f2f", "#b0bec5"
_COLOURS = "viridis_r"
_DOWN, _UP, _HALF = -0.55, 0.55, 1.0  # where the arrows run, and half the width of a box
_BOX_HEIGHT, _PITCH = 0.62, 1.9
_INCHES = 0.62
_WIDEST, _THINNEST = 11.0, 1.5


@dataclass(frozen=True)
class _Link:
    """What goes between two calls, or into the first and out of the last."""

    down: str
    up: str
    size: float | None
    """The largest absolute value of the gradient, None where there is no gradient."""
    finite: bool
    joined_down: bool
    joined_up: bool
    """Whether what leaves the one is what arrives at the other."""


def picture_of(calls: Sequence[Call], steps: Sequence[Step], numbers: Sequence[int] | None) -> "Figure":
    """Draw the calls of these numbers; see `Trace.plot`."""
    plt = _pyplot()
    shown = _shown(calls, numbers)
    firsts: dict[int, Step] = {}
    for step in steps:
        firsts.setdefault(step.of.number, step)
    own = [firsts.get(call.number) for call in shown]
    links = _links(shown, own)
    height = (len(shown) * _PITCH + 1.7) * _INCHES
    figure, axes = plt.subplots(figsize=(6.4, max(height, 2.4)), layout="constrained")
    axes.set_axis_off()
    axes.set_xlim(-4.2, 4.2)
    axes.set_ylim(-(len(shown) - 0.5) * _PITCH - 0.45, 0.5 * _PITCH + 0.85)
    _draw_links(axes, links, plt.get_cmap(_COLOURS))
    for place, (call, step) in enumerate(zip(shown, own, strict=True)):
        _draw_call(axes, -place * _PITCH, call, step)
    top = 0.5 * _PITCH + 0.55
    style: dict[str, Any] = {"color": _GREY, "fontsize": 11, "va": "bottom"}
    axes.text(_DOWN - 0.35, top, "values", ha="right", **style)
    axes.text(_UP + 0.35, top, "gradients", ha="left", **style)
    return figure  # type: ignore[no-any-return]


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            message(
                "Trace.plot",
                "a picture is drawn with matplotlib",
                required="matplotlib, which is an extra",
                got=str(error),
                mend='pip install "multigrad[plot]"',
            )
        ) from error
    return plt


def _shown(calls: Sequence[Call], numbers: Sequence[int] | None) -> list[Call]:
    if numbers is None:
        shown = [call for call in calls if call.within is None]
    else:
        shown = [call for call in calls if call.number in set(numbers)]
    if not shown or (numbers is not None and len(shown) < len(set(numbers))):
        raise ValueError(
            message(
                "Trace.plot",
                "there is no such call to draw",
                required=f"numbers from 1 to {len(calls)}" if calls else "a trace in which an op was called",
                got="all calls" if numbers is None else str(list(numbers)),
                mend="print the trace, which shows the calls with their numbers",
            )
        )
    return shown


def _links(calls: Sequence[Call], steps: Sequence[Step | None]) -> list[_Link]:
    """What goes into the first call, between two, and out of the last."""
    ends: list[tuple[Call | None, Step | None]] = [
        (None, None),
        *zip(calls, steps, strict=True),
        (None, None),
    ]
    links = []
    for (above, back_above), (below, back_below) in zip(ends, ends[1:], strict=False):
        down = [above.outputs if above else None, below.inputs if below else None]
        up = [back_below.downstream if back_below else None, back_above.upstream if back_above else None]
        gradients = [values for values in up if values is not None]
        sizes = [largest_of(values) for values in gradients]
        known = [size for size in sizes if size is not None]
        arrays = [array for values in gradients for array in values.values() if array is not None]
        links.append(
            _Link(
                _text(down),
                _text(up),
                max(known, default=None) if known else (math.nan if arrays else None),
                all([bool(np.isfinite(array).all()) for array in arrays]),
                _joined(down),
                _joined(up),
            )
        )
    return links


def _joined(ends: Sequence[Values | None]) -> bool:
    """Whether the one end has the very numbers of the other. The first and the last link have one end."""
    if ends[0] is None or ends[1] is None:
        return True
    one, other = [[array for array in end.values() if array is not None] for end in ends if end is not None]
    return any(a.shape == b.shape and np.array_equal(a, b) for a in one for b in other)


def _text(ends: Sequence[Values | None]) -> str:
    there = [end for end in ends if end is not None]
    texts = [_values_text(end) for end in (there[:1] if _joined(ends) else there)]
    return "\n⋮\n".join(texts)


def _values_text(values: Values) -> str:
    shown = [(path, value_text(values, path)) for path, array in values.items() if array is not None]
    lines = [text if len(values) == 1 else f"{path}: {text}" for path, text in shown]
    return "\n".join(line.replace("\n", "  ") for line in lines) or "none"


def _draw_links(axes: "Axes", links: Sequence[_Link], colours: Any) -> None:
    sizes = [math.log10(link.size) for link in links if link.size and math.isfinite(link.size)]
    low, high = min(sizes, default=0.0), max(sizes, default=0.0)
    for place, link in enumerate(links):
        top = (0.5 - place) * _PITCH + 0.5 * (_PITCH - _BOX_HEIGHT) - 0.06
        bottom = (0.5 - place) * _PITCH - 0.5 * (_PITCH - _BOX_HEIGHT) + 0.06
        middle = 0.5 * (top + bottom)
        _arrow(axes, _DOWN, top, bottom, _GREY, 2.0, link.joined_down)
        axes.text(_DOWN - 0.35, middle, link.down, ha="right", va="center", color=_INK, fontsize=10)
        colour, width = _NONE, _THINNEST
        if not link.finite:
            colour, width = _WRONG, _WIDEST / 2
        elif link.size:
            share = (math.log10(link.size) - low) / (high - low) if high > low else 0.5
            colour, width = (
                colours(0.15 + 0.75 * share),
                _THINNEST + 1.5 + share * (_WIDEST - _THINNEST - 1.5),
            )
        if link.size is not None:
            _arrow(axes, _UP, bottom, top, colour, width, link.joined_up)
            ink = _INK if link.finite else _WRONG
            axes.text(_UP + 0.35, middle, link.up, ha="left", va="center", color=ink, fontsize=10)


def _arrow(axes: "Axes", x: float, start: float, end: float, colour: Any, width: float, whole: bool) -> None:
    style = {
        "arrowstyle": f"-|>,head_length={0.35 + width / 18},head_width={0.2 + width / 22}",
        "mutation_scale": 16,
        "shrinkA": 0,
        "shrinkB": 0,
        "color": colour,
        "linewidth": width,
        "linestyle": "-" if whole else (0, (1, 1)),
        "joinstyle": "miter",
        "capstyle": "butt",
    }
    axes.annotate("", (x, end), (x, start), arrowprops=style)


def _draw_call(axes: "Axes", y: float, call: Call, step: Step | None) -> None:
    from matplotlib.patches import FancyBboxPatch

    flags = [*call.flags, *(step.flags if step else [])]
    edge = _WRONG if flags else _INK
    box = FancyBboxPatch(
        (-_HALF, y - _BOX_HEIGHT / 2),
        2 * _HALF,
        _BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.12",
        facecolor=_BOX,
        edgecolor=edge,
        linewidth=1.2,
    )
    axes.add_patch(box)
    axes.text(0, y, call.title, ha="center", va="center", color=_INK, fontsize=11, weight="bold")
    if step is not None and len(step.current) == 1:
        (current,) = step.current.values()
        axes.text(_HALF + 0.15, y, f"× {number_text(current)}", va="center", color=_GREY, fontsize=11)
    if flags:
        axes.text(
            -_HALF - 0.15, y, "\n".join(flags), ha="right", va="center", color=_WRONG, fontsize=8, wrap=True
        )
