"""`Trace.plot`: a chain of calls as a figure, with values on the left and gradients on the right.

The calls are boxes, one below another. Between two boxes, an arrow of values points down, and an arrow of
gradients points up.
"""

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from multigrad.common.errors import message, unusable
from multigrad.tracing.diagnosis import diagnose, first_bad, innermost
from multigrad.tracing.records import CallRecord, StepRecord, Values, largest_magnitude
from multigrad.tracing.table import format_number, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Text on white and on a box has a contrast of at least 4.5.
_INK, _GREY, _BOX, _RED = "#263238", "#546e7a", "#eceff1", "#c62828"

# Lengths are in inches, and so are the coordinates of the axes.
_BOX_HEIGHT, _LINE_HEIGHT, _CHARACTER = 0.4, 0.17, 0.082
_VALUES_X, _GRADIENTS_X = -0.3, 0.3  # the columns of arrows
_VALUE_WIDTH, _MIN_WIDTH, _MAX_WIDTH = 0.03, 0.04, 0.26  # of arrows
_MANY = 12
"""With this number of calls or more, each array is described on one line."""


class _Arrow(NamedTuple):
    """The values or gradients between two calls, before the first call, or after the last."""

    text: str
    """The arrays at both ends, from top to bottom, or at one end if they are joined."""
    magnitude: float | None
    """The largest absolute value along the chain, None if there is none."""
    is_finite: bool
    is_joined: bool
    """Whether both ends have an array in common, so that the arrow has no gap."""
    is_marked: bool
    """Whether the first bad value or gradient of the trace is here."""
    upward: bool


def _arrow(
    ends: tuple[Values | None, Values | None], is_marked: bool, compact: bool, upward: bool = False
) -> _Arrow:
    """Return the arrow between the arrays above and below.

    None stands for the end without a call, and for gradients of a layer.
    """
    present = [end for end in ends if end is not None]
    arrays = [[array for array in end.values() if array is not None] for end in present]
    # Bytes, because NaN is not equal to itself.
    is_joined = len(arrays) < 2 or any(
        a.shape == b.shape and a.tobytes() == b.tobytes() for a in arrays[0] for b in arrays[1]
    )
    # The upstream gradient of the call above belongs to the chain. Downstream also has parameters.
    magnitude = (largest_magnitude(present[-1]) or 0.0) if any(arrays) else None
    shown = present[:1] if is_joined else present
    texts = [_values_text(end, compact) for end in (shown[-1:] if compact else shown)]
    text = "\n⋮\n".join(reversed(texts) if upward else texts)
    return _Arrow(text, magnitude, all(map(_is_finite, present)), is_joined, is_marked, upward)


def draw_trace(
    calls: Sequence[CallRecord], steps: Sequence[StepRecord], numbers: Sequence[int] | None
) -> "Figure":
    """Draw the calls with these numbers, as `Trace.plot` documents."""
    plt = import_pyplot("Trace.plot")
    from matplotlib.colors import LogNorm

    drawn = _select(calls, numbers)
    first_steps = {step.call.number: step for step in reversed(steps)}
    drawn_steps = [first_steps.get(call.number) for call in drawn]
    flags = ["\n".join([*c.flags, *(s.flags if s else [])]) for c, s in zip(drawn, drawn_steps, strict=True)]
    values, gradients = _arrows(drawn, drawn_steps, first_bad(calls, steps))
    magnitudes = [arrow.magnitude for arrow in gradients if arrow.magnitude and arrow.magnitude < math.inf]
    low, high = min(magnitudes, default=1.0), max(magnitudes, default=1.0)

    texts = [[arrow.text for arrow in arrows] for arrows in (values, gradients)]
    half_title = 0.5 * _width(call.title for call in drawn)
    left = 0.6 + max(_width(texts[0]), half_title + _width(flags))
    right = 0.7 + max(_width(texts[1]), half_title + 0.8)
    summary = diagnose(calls, steps)
    if magnitudes:
        scale = f"from {format_number(low)} to {format_number(high)}" if low < high else format_number(low)
        summary.append(f"Width and colour of a gradient: its largest absolute value, logarithmic, {scale}.")
    summary = [textwrap.fill(line, int((left + right) / _CHARACTER)) for line in summary]
    lines = max(1 + text.count("\n") for text in itertools.chain(*texts))
    gap = max(0.6 if len(drawn) >= _MANY else 0.95, 0.1 + lines * _LINE_HEIGHT)
    top = 0.5 + sum(map(_height, summary))
    bottom = -len(drawn) * (_BOX_HEIGHT + gap) - gap - 0.1
    figure = plt.figure(figsize=(left + right, top - bottom))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-left, right), ylim=(bottom, top))
    axes.set_axis_off()

    y = top - 0.1
    for text in summary:
        color = _RED if text.startswith(("Forward", "Backward")) else _GREY
        axes.text(0.1 - left, y, text, va="top", color=color)
        y -= _height(text)
    for x, text, side in ((_VALUES_X, "values ↓", "right"), (_GRADIENTS_X, "gradients ↑", "left")):
        axes.text(x, 0.35, text, color=_GREY, fontsize=11, va="top", ha=side)
    norm = LogNorm(low, max(high, 10.0 * low))  # at least a factor of ten
    for i, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
        start = -i * (_BOX_HEIGHT + gap) - 0.04
        end = start - gap + 0.08
        style = (_RED, _MAX_WIDTH / 2, _RED) if value.is_marked else (_GREY, _VALUE_WIDTH, _INK)
        _draw_arrow(axes, value, (_VALUES_X, start, end), *style)
        if gradient.magnitude is None:
            continue
        style = _GREY, _MIN_WIDTH, _INK  # a gradient of zeros
        if not gradient.is_finite:
            style = _RED, _MAX_WIDTH / 2, _RED
        elif gradient.magnitude:
            share = float(norm(gradient.magnitude))
            color = plt.get_cmap("viridis_r")(0.1 + 0.8 * share)
            style = color, _MIN_WIDTH + share * (_MAX_WIDTH - _MIN_WIDTH), _INK
        _draw_arrow(axes, gradient, (_GRADIENTS_X, end, start), *style)
    for i, (call, step) in enumerate(zip(drawn, drawn_steps, strict=True)):
        _draw_call(axes, -gap - i * (_BOX_HEIGHT + gap) - _BOX_HEIGHT / 2, call.title, step, flags[i])
    return figure


def _height(text: str) -> float:
    return (1 + text.count("\n")) * _LINE_HEIGHT + 0.05


def _width(texts: Iterable[str]) -> float:
    return _CHARACTER * max([len(line) for text in texts for line in text.splitlines()], default=0)


def import_pyplot(method: str) -> Any:
    """Return matplotlib, an optional dependency, which `method` needs."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        problem = "plotting requires matplotlib"
        required, fix = "matplotlib, an optional dependency", "pip install matplotlib"
        raise ImportError(message(method, problem, required=required, got=str(error), fix=fix)) from error
    return plt


def _select(calls: Sequence[CallRecord], numbers: Sequence[int] | None) -> list[CallRecord]:
    if numbers is None:
        selected = innermost(calls)
    else:
        selected = [call for call in calls if call.number in set(numbers)]
    if not selected or (numbers is not None and len(selected) < len(set(numbers))):
        required = f"numbers from 1 to {len(calls)}" if calls else "a trace in which an op was called"
        fix = "print the trace, which lists the calls with their numbers"
        raise unusable(ValueError, "Trace.plot", "calls", required=required, got=numbers, fix=fix)
    return selected


def _arrows(
    calls: Sequence[CallRecord],
    steps: Sequence[StepRecord | None],
    marked: tuple[int | None, int | None],
) -> tuple[list[_Arrow], list[_Arrow]]:
    """Return the arrows of values and of gradients before the first call, between calls, and after the last.

    `marked` are the numbers of the calls with the first bad value and gradient.
    """
    compact = len(calls) >= _MANY
    ends = [(None, None), *zip(calls, steps, strict=True), (None, None)]
    values, gradients = [], []
    for (above, step_above), (below, step_below) in itertools.pairwise(ends):
        arrives = below is not None and below.number == marked[0] and not _is_finite(below.inputs)
        leaves = above is not None and above.number == marked[0] and _is_finite(above.inputs)
        passed = above.outputs if above else None, below.inputs if below else None
        values.append(_arrow(passed, arrives or leaves, compact))
        downstream = (step_below.downstream or None) if step_below else None  # a layer has none
        pulled = downstream, step_above.upstream if step_above else None
        is_bad = above is not None and above.number == marked[1]
        gradients.append(_arrow(pulled, is_bad, compact, upward=True))
    return values, gradients


def _is_finite(values: Values) -> bool:
    return all(array is None or np.isfinite(array).all() for array in values.values())


def _values_text(values: Values, compact: bool) -> str:
    present = [path for path, array in values.items() if array is not None]
    texts = [format_value(values, path, compact).replace("\n", "  ") for path in present]
    pairs = zip(present, texts, strict=True)
    return "\n".join(text if len(values) == 1 else f"{path}: {text}" for path, text in pairs) or "none"


def _draw_arrow(
    axes: "Axes", arrow: _Arrow, place: tuple[float, float, float], color: Any, width: float, ink: str
) -> None:
    """Draw a vertical arrow, with a gap if its ends are not joined, and its text beside it."""
    x, start, end = place
    middle = 0.5 * (start + end)
    text_x, side = (x + 0.3, "left") if arrow.upward else (x - 0.15, "right")
    weight = "bold" if arrow.is_marked else "normal"
    axes.text(text_x, middle, arrow.text, ha=side, va="center", color=ink, weight=weight)
    if not arrow.is_joined:
        axes.vlines(x, start, start + 0.35 * (end - start), color=color, linewidth=72 * width)
        start = middle
    head = {"head_width": 1.6 * width + 0.1, "head_length": min(0.12 + width, 0.32)}
    form = {"width": width, "length_includes_head": True, "color": color, "linewidth": 0}
    axes.arrow(x, start, 0, end - start, **head, **form)
    if arrow.is_marked and arrow.upward:
        axes.plot(x, middle, marker="o", markersize=12, mfc="white", mec=_RED, mew=2)


def _draw_call(axes: "Axes", y: float, title: str, step: StepRecord | None, flags: str) -> None:
    """Draw the box of a call, its scalar derivative on the right and its flags on the left."""
    frame = {"boxstyle": "round,pad=0.6", "facecolor": _BOX, "edgecolor": _RED if flags else _INK, "lw": 1.2}
    form: Any = {"va": "center", "fontsize": 11}
    box = axes.text(0, y, title, ha="center", color=_INK, weight="bold", bbox=frame, **form)
    beside: Any = {"xycoords": box, "textcoords": "offset points"}
    if step is not None and len(step.current) == 1:
        (current,) = step.current.values()
        text = f"× {format_number(current)}"
        axes.annotate(text, (1, 0.5), (14, 0), color=_GREY, **beside, **form)
    if flags:
        axes.annotate(flags, (0, 0.5), (-14, 0), ha="right", va="center", color=_RED, fontsize=8, **beside)
