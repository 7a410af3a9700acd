"""A trace as a picture: the calls one below the other, values down on the left, gradients up on the right."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad.errors import message
from multigrad.tracing.records import Call, Step, Values, largest_of
from multigrad.tracing.table import number_text, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GREY, _BOX, _WRONG = "#263238", "#90a4ae", "#eceff1", "#d32f2f"
_COLOURS = "viridis_r"

# In inches, and a picture's coordinates are inches.
_BOX_HEIGHT, _GAP, _LINE = 0.4, 0.95, 0.17
_HEAD = 0.35
_DOWN, _UP = -0.3, 0.3  # where the arrows run
_SHAFT, _THINNEST, _WIDEST = 0.03, 0.04, 0.26
_LETTER, _SMALL, _BOLD = 0.082, 0.062, 0.1  # about the width of a letter at these sizes:
_SIZE, _SMALL_SIZE, _BOLD_SIZE = 10, 8, 11


@dataclass(frozen=True)
class _Link:
    """What goes between two calls, or into the first and out of the last."""

    down: str
    up: str
    size: float | None
    """The largest absolute value of the gradient along the chain, None where there is no gradient."""
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
    half = 0.5 * max(1.2, 0.25 + _BOLD * max(len(call.title) for call in shown))
    flags = [[*call.flags, *(back.flags if back else [])] for call, back in zip(shown, own, strict=True)]
    left = max(
        1.1,
        _width([link.down for link in links], _LETTER) + 0.5,
        half + 0.1 + _width(list(itertools.chain(*flags)), _SMALL),
    )
    right = max(_width([link.up for link in links], _LETTER) + 0.6, half + 1.0)
    lines = max(1 + text.count("\n") for link in links for text in (link.down, link.up))
    gap = max(_GAP, 0.1 + lines * _LINE)
    height = len(shown) * (_BOX_HEIGHT + gap) + gap + _HEAD
    figure = plt.figure(figsize=(left + right + 0.2, height + 0.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-left - 0.1, right + 0.1), ylim=(-height - 0.1, 0.1))
    axes.set_axis_off()
    head: dict[str, Any] = {"color": _GREY, "fontsize": _BOLD_SIZE, "va": "top"}
    axes.text(_DOWN, 0, "values ↓", ha="right", **head)
    axes.text(_UP, 0, "gradients ↑", ha="left", **head)
    _draw_links(axes, links, gap, plt.get_cmap(_COLOURS))
    for place, call in enumerate(shown):
        y = -_HEAD - gap - place * (_BOX_HEIGHT + gap)
        _draw_call(axes, y, half, call.title, own[place], flags[place])
    return figure


def _width(texts: Sequence[str], letter: float) -> float:
    return letter * max([len(line) for text in texts for line in text.splitlines()], default=0)


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
                mend="pip install matplotlib",
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
    for (above, back_above), (below, back_below) in itertools.pairwise(ends):
        down = [above.outputs if above else None, below.inputs if below else None]
        up = [back_below.downstream if back_below else None, back_above.upstream if back_above else None]
        links.append(_link(down, up))
    return links


def _link(down: Sequence[Values | None], up: Sequence[Values | None]) -> _Link:
    gradients = [values for values in up if values is not None]
    arrays = [array for values in gradients for array in values.values() if array is not None]
    return _Link(
        _text(down),
        _text(up, upward=True),
        # What arrives at the call above is of the chain alone, without the gradients of parameters.
        (largest_of(gradients[-1]) or 0.0) if arrays else None,
        all([bool(np.isfinite(array).all()) for array in arrays]),
        _joined(down),
        _joined(up),
    )


def _joined(ends: Sequence[Values | None]) -> bool:
    """Whether the one end has the very numbers of the other. The first and the last link have one end."""
    if ends[0] is None or ends[1] is None:
        return True
    one, other = [[array for array in end.values() if array is not None] for end in ends if end is not None]
    return any(a.shape == b.shape and a.tobytes() == b.tobytes() for a in one for b in other)  # NaN, too


def _text(ends: Sequence[Values | None], upward: bool = False) -> str:
    """The values at both ends, or at their first where it has those of the other; the upper one is above."""
    there = [end for end in ends if end is not None]
    texts = [_values_text(end) for end in (there[:1] if _joined(ends) else there)]
    return "\n⋮\n".join(reversed(texts) if upward else texts)


def _values_text(values: Values) -> str:
    shown = [(path, value_text(values, path)) for path, array in values.items() if array is not None]
    lines = [text if len(values) == 1 else f"{path}: {text}" for path, text in shown]
    return "\n".join(line.replace("\n", "  ") for line in lines) or "none"


def _draw_links(axes: "Axes", links: Sequence[_Link], gap: float, colours: Any) -> None:
    sizes = [math.log10(link.size) for link in links if link.size and math.isfinite(link.size)]
    low = min(sizes, default=0.0)
    high = max([low + 1.0, *sizes])  # a factor of less than ten does not look like one of a thousand
    for place, link in enumerate(links):
        top = -_HEAD - place * (_BOX_HEIGHT + gap) - 0.04
        bottom = top - gap + 0.08
        middle = 0.5 * (top + bottom)
        _draw_arrow(axes, _DOWN, top, bottom, _GREY, _SHAFT, link.joined_down)
        axes.text(_DOWN - 0.15, middle, link.down, ha="right", va="center", color=_INK, fontsize=_SIZE)
        if link.size is None:
            continue
        colour, width, ink = _GREY, _THINNEST, _INK  # all zero
        if not link.finite:
            colour, width, ink = _WRONG, _WIDEST / 2, _WRONG
        elif link.size:
            share = (math.log10(link.size) - low) / (high - low)
            colour, width = colours(0.1 + 0.8 * share), _THINNEST + share * (_WIDEST - _THINNEST)
        _draw_arrow(axes, _UP, bottom, top, colour, width, link.joined_up)
        axes.text(_UP + 0.3, middle, link.up, ha="left", va="center", color=ink, fontsize=_SIZE)


def _draw_arrow(
    axes: "Axes", x: float, start: float, end: float, colour: Any, width: float, joined: bool
) -> None:
    """An arrow, with a gap in it where something other than an op lies between its ends."""
    from matplotlib.patches import FancyArrow, Rectangle

    length = end - start
    head = min(0.12 + width, 0.32)
    if not joined:
        axes.add_patch(Rectangle((x - width / 2, start), width, 0.35 * length, color=colour, linewidth=0))
        start += 0.48 * length
    arrow = FancyArrow(
        x,
        start,
        0,
        end - start,
        width=width,
        head_width=1.6 * width + 0.1,
        head_length=head,
        length_includes_head=True,
        color=colour,
        linewidth=0,
    )
    axes.add_patch(arrow)


def _draw_call(
    axes: "Axes", top: float, half: float, title: str, step: Step | None, flags: Sequence[str]
) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch(
        (-half, top - _BOX_HEIGHT),
        2 * half,
        _BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=_BOX,
        edgecolor=_WRONG if flags else _INK,
        linewidth=1.2,
    )
    axes.add_patch(box)
    middle = top - _BOX_HEIGHT / 2
    axes.text(0, middle, title, ha="center", va="center", color=_INK, fontsize=_BOLD_SIZE, weight="bold")
    if step is not None and len(step.current) == 1:
        (current,) = step.current.values()
        text = f"× {number_text(current)}"
        axes.text(half + 0.1, middle, text, va="center", color=_GREY, fontsize=_BOLD_SIZE)
    if flags:
        text = "\n".join(flags)
        axes.text(-half - 0.1, middle, text, ha="right", va="center", color=_WRONG, fontsize=_SMALL_SIZE)
