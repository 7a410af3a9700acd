"""`Trace.plot`: a chain of calls as a figure, with values on the left and gradients on the right.

The calls are boxes, one below another. A `_Link` describes the space between two boxes: the arrow of values
down, and the arrow of gradients up.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad.common.errors import message
from multigrad.tracing.diagnosis import diagnose, first_bad, innermost
from multigrad.tracing.records import CallRecord, StepRecord, Values, largest_magnitude
from multigrad.tracing.table import format_compact, format_number, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Text on white and on a box has a contrast of at least 4.5.
_INK, _GREY, _BOX, _RED = "#263238", "#546e7a", "#eceff1", "#c62828"
_COLORMAP = "viridis_r"

# Lengths are in inches, and so are the coordinates of the axes.
_BOX_HEIGHT, _MIN_GAP, _SMALL_GAP, _LINE_HEIGHT, _HEADER_HEIGHT = 0.4, 0.95, 0.6, 0.17, 0.35
_VALUES_X, _GRADIENTS_X = -0.3, 0.3  # the columns of arrows
_VALUE_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 0.03, 0.04, 0.26  # of arrows
# Font sizes in points, and the approximate width of a character at each size.
_FONT, _SMALL_FONT, _BOLD_FONT = 10, 8, 11
_CHARACTER, _SMALL_CHARACTER, _BOLD_CHARACTER = 0.082, 0.062, 0.1
_MANY = 12
"""With this number of calls or more, each array is described on one line."""


@dataclass(frozen=True)
class _Link:
    """The values and gradients between two calls, before the first call, or after the last."""

    value_text: str
    gradient_text: str
    magnitude: float | None
    """The largest absolute value of the gradient along the chain, None if there is no gradient."""
    is_finite: bool
    marks_value: bool
    """Whether the first bad value of the trace is here."""
    marks_gradient: bool
    """Whether the first bad gradient of the trace is here."""
    values_joined: bool
    """Whether an output of the call above is an input of the call below, so the arrow has no gap."""
    gradients_joined: bool
    """Whether a downstream gradient of the call below is an upstream gradient of the call above."""


def draw_trace(
    calls: Sequence[CallRecord], steps: Sequence[StepRecord], numbers: Sequence[int] | None
) -> "Figure":
    """Draw the calls with these numbers, as `Trace.plot` documents."""
    plt = import_pyplot("Trace.plot")
    drawn = _select(calls, numbers)
    first_steps: dict[int, StepRecord] = {}
    for step in steps:
        first_steps.setdefault(step.call.number, step)
    drawn_steps = [first_steps.get(call.number) for call in drawn]
    flags = [[*c.flags, *(s.flags if s else [])] for c, s in zip(drawn, drawn_steps, strict=True)]
    links = _links(drawn, drawn_steps, first_bad(calls, steps))
    summary = _summary(calls, steps, links)
    half_box = 0.5 * max(1.2, 0.25 + _BOLD_CHARACTER * max(len(call.title) for call in drawn))
    left = max(
        1.1,
        _text_width([link.value_text for link in links], _CHARACTER) + 0.5,
        half_box + 0.1 + _text_width(list(itertools.chain(*flags)), _SMALL_CHARACTER),
    )
    right = max(_text_width([link.gradient_text for link in links], _CHARACTER) + 0.6, half_box + 1.0)
    lines = max(1 + text.count("\n") for link in links for text in (link.value_text, link.gradient_text))
    gap = max(_MIN_GAP if len(drawn) < _MANY else _SMALL_GAP, 0.1 + lines * _LINE_HEIGHT)
    height = len(drawn) * (_BOX_HEIGHT + gap) + gap + _HEADER_HEIGHT
    texts = [textwrap.fill(line, int((left + right) / _CHARACTER)) for line in summary]
    above = sum(_height(text) for text in texts) + 0.1
    figure = plt.figure(figsize=(left + right + 0.2, height + above + 0.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-left - 0.1, right + 0.1), ylim=(-height - 0.1, above + 0.1))
    axes.set_axis_off()
    y = above
    for text in texts:
        color = _RED if text.startswith(("Forward", "Backward")) else _GREY
        axes.text(-left, y, text, va="top", color=color, fontsize=_FONT)
        y -= _height(text)
    for x, text, side in ((_VALUES_X, "values ↓", "right"), (_GRADIENTS_X, "gradients ↑", "left")):
        axes.text(x, 0, text, color=_GREY, fontsize=_BOLD_FONT, va="top", ha=side)
    _draw_links(axes, links, gap, plt.get_cmap(_COLORMAP))
    for i, call in enumerate(drawn):
        top = -_HEADER_HEIGHT - gap - i * (_BOX_HEIGHT + gap)
        _draw_call(axes, top, half_box, call.title, drawn_steps[i], flags[i])
    return figure


def _height(text: str) -> float:
    return (1 + text.count("\n")) * _LINE_HEIGHT + 0.05


def _text_width(texts: Sequence[str], character: float) -> float:
    return character * max([len(line) for text in texts for line in text.splitlines()], default=0)


def import_pyplot(method: str) -> Any:
    """Return matplotlib, an optional dependency, which `method` needs."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            message(
                method,
                "plotting requires matplotlib",
                required="matplotlib, an optional dependency",
                got=str(error),
                fix="pip install matplotlib",
            )
        ) from error
    return plt


def _select(calls: Sequence[CallRecord], numbers: Sequence[int] | None) -> list[CallRecord]:
    if numbers is None:
        selected = innermost(calls)
    else:
        selected = [call for call in calls if call.number in set(numbers)]
    if not selected or (numbers is not None and len(selected) < len(set(numbers))):
        raise ValueError(
            message(
                "Trace.plot",
                "the trace has no calls with these numbers",
                required=f"numbers from 1 to {len(calls)}" if calls else "a trace in which an op was called",
                got="all calls" if numbers is None else str(list(numbers)),
                fix="print the trace, which lists the calls with their numbers",
            )
        )
    return selected


def _summary(calls: Sequence[CallRecord], steps: Sequence[StepRecord], links: Sequence[_Link]) -> list[str]:
    """Return the diagnosis of the trace, and the meaning of the width of an arrow."""
    magnitudes = [link.magnitude for link in links if link.magnitude and math.isfinite(link.magnitude)]
    if not magnitudes:
        return diagnose(calls, steps)
    low, high = format_number(min(magnitudes)), format_number(max(magnitudes))
    scale = f"from {low} to {high}" if low != high else low
    width = f"Width and colour of a gradient: its largest absolute value, logarithmic, {scale}."
    return [*diagnose(calls, steps), width]


def _links(
    calls: Sequence[CallRecord],
    steps: Sequence[StepRecord | None],
    marked: tuple[int | None, int | None],
) -> list[_Link]:
    """Return the link before the first call, those between calls, and the one after the last call.

    `marked` are the numbers of the calls with the first bad value and gradient.
    """
    compact = len(calls) >= _MANY
    bad_value, bad_gradient = marked
    ends = [(None, None), *zip(calls, steps, strict=True), (None, None)]
    links = []
    for (above, step_above), (below, step_below) in itertools.pairwise(ends):
        values = [above.outputs if above else None, below.inputs if below else None]
        gradients = [
            (step_below.downstream or None) if step_below else None,  # a layer has none
            step_above.upstream if step_above else None,
        ]
        present = [end for end in gradients if end is not None]
        has_gradient = any(array is not None for end in present for array in end.values())
        arrives = below is not None and below.number == bad_value and not _is_finite(below.inputs)
        leaves = above is not None and above.number == bad_value and _is_finite(above.inputs)
        link = _Link(
            _text(values, compact),
            _text(gradients, compact, upward=True),
            # The upstream gradient of the call above belongs to the chain. Downstream also has parameters.
            (largest_magnitude(present[-1]) or 0.0) if has_gradient else None,
            all(map(_is_finite, present)),
            arrives or leaves,
            above is not None and above.number == bad_gradient,
            _are_joined(values),
            _are_joined(gradients),
        )
        links.append(link)
    return links


def _is_finite(values: Values) -> bool:
    return all(array is None or np.isfinite(array).all() for array in values.values())


def _are_joined(ends: Sequence[Values | None]) -> bool:
    """Return whether both ends of an arrow have an array in common. The first and last link have one end."""
    if ends[0] is None or ends[1] is None:
        return True
    start, stop = [[array for array in end.values() if array is not None] for end in ends if end is not None]
    # Bytes, because NaN is not equal to itself.
    return any(a.shape == b.shape and a.tobytes() == b.tobytes() for a in start for b in stop)


def _text(ends: Sequence[Values | None], compact: bool, upward: bool = False) -> str:
    """Return the values at both ends of an arrow, from top to bottom, or at one end if they are joined."""
    present = [end for end in ends if end is not None]
    present = present[:1] if _are_joined(ends) else present
    texts = [_values_text(end, compact) for end in (present[-1:] if compact else present)]
    return "\n⋮\n".join(reversed(texts) if upward else texts)


def _values_text(values: Values, compact: bool) -> str:
    form = format_compact if compact else format_value
    formatted = [(path, form(values, path)) for path, array in values.items() if array is not None]
    lines = [text if len(values) == 1 else f"{path}: {text}" for path, text in formatted]
    return "\n".join(line.replace("\n", "  ") for line in lines) or "none"


def _draw_links(axes: "Axes", links: Sequence[_Link], gap: float, colormap: Any) -> None:
    logarithms = [
        math.log10(link.magnitude) for link in links if link.magnitude and math.isfinite(link.magnitude)
    ]
    low = min(logarithms, default=0.0)
    high = max([low + 1.0, *logarithms])  # the scale covers at least a factor of ten
    for i, link in enumerate(links):
        top = -_HEADER_HEIGHT - i * (_BOX_HEIGHT + gap) - 0.04
        bottom = top - gap + 0.08
        middle = 0.5 * (top + bottom)
        color, width, ink = (_RED, _MAX_WIDTH / 2, _RED) if link.marks_value else (_GREY, _VALUE_WIDTH, _INK)
        _draw_arrow(axes, _VALUES_X, top, bottom, color, width, link.values_joined)
        _describe(axes, _VALUES_X - 0.15, middle, link.value_text, "right", ink, link.marks_value)
        if link.magnitude is None:
            continue
        color, width, ink = _GREY, _MIN_WIDTH, _INK  # a gradient of zeros
        if not link.is_finite:
            color, width, ink = _RED, _MAX_WIDTH / 2, _RED
        elif link.magnitude:
            share = (math.log10(link.magnitude) - low) / (high - low)
            color, width = colormap(0.1 + 0.8 * share), _MIN_WIDTH + share * (_MAX_WIDTH - _MIN_WIDTH)
        _draw_arrow(axes, _GRADIENTS_X, bottom, top, color, width, link.gradients_joined)
        _describe(axes, _GRADIENTS_X + 0.3, middle, link.gradient_text, "left", ink, link.marks_gradient)
        if link.marks_gradient:
            axes.plot(_GRADIENTS_X + 0.02, middle, marker="o", markersize=12, mfc="white", mec=_RED, mew=2)


def _describe(axes: "Axes", x: float, y: float, text: str, side: str, color: str, is_bold: bool) -> None:
    weight = "bold" if is_bold else "normal"
    axes.text(x, y, text, ha=side, va="center", color=color, fontsize=_FONT, weight=weight)


def _draw_arrow(
    axes: "Axes", x: float, start: float, end: float, color: Any, width: float, joined: bool
) -> None:
    """Draw a vertical arrow, with a gap if its ends are not joined."""
    from matplotlib.patches import Rectangle

    length = end - start
    if not joined:
        axes.add_patch(Rectangle((x - width / 2, start), width, 0.35 * length, color=color, linewidth=0))
        start += 0.48 * length
    head = {"head_width": 1.6 * width + 0.1, "head_length": min(0.12 + width, 0.32)}
    form = {"width": width, "length_includes_head": True, "color": color, "linewidth": 0}
    axes.arrow(x, start, 0, end - start, **head, **form)


def _draw_call(
    axes: "Axes", top: float, half_box: float, title: str, step: StepRecord | None, flags: Sequence[str]
) -> None:
    """Draw the box of a call, its scalar derivative on the right and its flags on the left."""
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch((-half_box, top - _BOX_HEIGHT), 2 * half_box, _BOX_HEIGHT, facecolor=_BOX, lw=1.2)
    box.set(boxstyle="round,pad=0,rounding_size=0.08", edgecolor=_RED if flags else _INK)
    axes.add_patch(box)
    middle = top - _BOX_HEIGHT / 2
    axes.text(0, middle, title, ha="center", va="center", color=_INK, fontsize=_BOLD_FONT, weight="bold")
    if step is not None and len(step.current) == 1:
        (current,) = step.current.values()
        text = f"× {format_number(current)}"
        axes.text(half_box + 0.1, middle, text, va="center", color=_GREY, fontsize=_BOLD_FONT)
    if flags:
        text = "\n".join(flags)
        axes.text(-half_box - 0.1, middle, text, ha="right", va="center", color=_RED, fontsize=_SMALL_FONT)
