"""`GradientLogger.plot`: a heat map of one statistic, layers by steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from multigrad.callbacks.records import STATISTICS, TENSORS, GradientRecord
from multigrad.common.errors import message, unusable
from multigrad.tracing.plot import import_pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = "GradientLogger.plot"
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
            required, fix = " or ".join(map(repr, allowed)), "pass one of these texts"
            raise unusable(ValueError, _NAME, argument, required=required, got=value, fix=fix)
    names = list(dict.fromkeys(name for record in records for name in getattr(record, of)))
    if not names:
        problem, required = "there is nothing to draw", f"records with {_TITLES[of]}"
        got, fix = "no record", "pass the logger to `fit` first"
        if records:
            got, fix = f"{len(records)} records without them", "draw of='gradients'"
        raise ValueError(message(_NAME, problem, required=required, got=got, fix=fix))
    plt = import_pyplot(_NAME)
    from matplotlib.colors import LogNorm, Normalize

    cells = [[getattr(record, of).get(name) for record in records] for name in names]
    values = np.array([[getattr(s, statistic) if s else np.nan for s in row] for row in cells])
    is_bad = [[s is not None and not s.is_finite for s in row] for row in cells]
    margin, height = 0.085 * max(map(len, names)) + 0.2, 0.24 * max(len(names), 4) + 1.0
    figure, axes = plt.subplots(figsize=(margin + 6.0, height), layout="constrained")
    norm: Any = Normalize(0.0, 1.0)
    if statistic in ("norm", "largest"):
        low = np.min(values, where=values > 0, initial=np.inf)
        low = low if np.isfinite(low) else 1.0
        norm = LogNorm(low, np.nanmax([10.0 * low, *values.flat]))  # at least a factor of ten
        axes.scatter(*np.nonzero(values.T == 0), marker=".", color="black", s=12)
    colormap = plt.get_cmap("viridis").with_extremes(bad="#eceff1")
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colormap, norm=norm)
    axes.scatter(*np.nonzero(np.transpose(is_bad)), marker="x", color="#c62828", linewidths=2)
    axes.set_yticks(range(len(names)), names)
    ticks = np.unique(np.linspace(0, len(records) - 1, min(len(records), 8)).round().astype(int))
    axes.set_xticks(ticks, [str(records[i].step) for i in ticks])
    axes.set_xlabel("step")
    name = {"norm": "Norm", "largest": "Largest absolute value"}.get(statistic, f"Fraction of {statistic}")
    axes.set_title(f"{name} of the {_TITLES[of]}", fontsize=11, loc="left")
    figure.colorbar(image, ax=axes)
    return figure
