"""`GradientLogger.plot`: a heat map of one statistic, layers by steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad.callbacks.records import STATISTICS, TENSORS, GradientRecord
from multigrad.common.errors import message
from multigrad.tracing.plot import import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _MISSING, _ZERO, _RED = "#263238", "#eceff1", "#000000", "#c62828"
_COLORMAP = "viridis"
_ROW_HEIGHT, _WIDTH, _CHARACTER = 0.24, 6.0, 0.085  # in inches
_TITLES = {
    "outputs": "outputs of layers",
    "upstream": "upstream gradients at the outputs of layers",
    "weights": "weights",
    "gradients": "gradients of weights",
}


def draw(records: Sequence[GradientRecord], of: str, statistic: str) -> "Figure":
    """Draw the heat map, as `GradientLogger.plot` documents."""
    for argument, value, allowed in (("of", of, TENSORS), ("statistic", statistic, STATISTICS)):
        if value not in allowed:
            text = message(
                "GradientLogger.plot",
                f"{argument} is not known",
                argument=f"'{argument}'",
                required=" or ".join(map(repr, allowed)),
                got=repr(value),
                fix="pass one of these texts",
            )
            raise ValueError(text)
    names = list(dict.fromkeys(name for record in records for name in getattr(record, of)))
    if not names:
        text = message(
            "GradientLogger.plot",
            "there is nothing to draw",
            required=f"records with {_TITLES[of]}",
            got=f"{len(records)} records without them" if records else "no record",
            fix="pass the logger to `fit` first" if not records else "draw of='gradients'",
        )
        raise ValueError(text)
    plt = import_pyplot("GradientLogger.plot")
    from matplotlib.colors import LogNorm, Normalize

    values, is_bad = _grid(records, names, of, statistic)
    height = _ROW_HEIGHT * max(len(names), 4) + 1.0
    margin = _CHARACTER * max(map(len, names)) + 0.2
    figure = plt.figure(figsize=(margin + _WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    is_share = statistic in ("zeros", "nans", "infinities")
    colormap = plt.get_cmap(_COLORMAP).with_extremes(bad=_MISSING)
    norm: Any = Normalize(0.0, 1.0)
    if not is_share:
        positive = values[values > 0]
        low = positive.min() if positive.size else 1.0
        norm = LogNorm(low, np.max(positive, initial=10.0 * low))  # at least a factor of ten
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colormap, norm=norm)
    rows, columns = np.nonzero(is_bad)
    axes.scatter(columns, rows, marker="x", color=_RED, linewidths=2)
    if not is_share:
        rows, columns = np.nonzero(values == 0)
        axes.scatter(columns, rows, marker=".", color=_ZERO, s=12)
    axes.set_yticks(range(len(names)), names)
    ticks = np.unique(np.linspace(0, len(records) - 1, min(len(records), 8)).round().astype(int))
    axes.set_xticks(ticks, [str(records[i].step) for i in ticks])
    axes.set_xlabel("step")
    name = {"norm": "Norm", "largest": "Largest absolute value"}.get(statistic, f"Fraction of {statistic}")
    axes.set_title(f"{name} of the {_TITLES[of]}", color=_INK, fontsize=11, loc="left")
    figure.colorbar(image, ax=axes)
    return figure


def _grid(
    records: Sequence[GradientRecord], names: Sequence[str], of: str, statistic: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values, NaN where there is none, and whether a tensor has NaN or infinite elements."""
    values, is_bad = np.full((len(names), len(records)), np.nan), np.zeros((len(names), len(records)), bool)
    for column, record in enumerate(records):
        for row, name in enumerate(names):
            if (statistics := getattr(record, of).get(name)) is not None:
                values[row, column] = getattr(statistics, statistic)
                is_bad[row, column] = not statistics.is_finite
    return values, is_bad
