"""The statistics of a recorded step, as plain numbers, and the first NaN or Inf in it.

This module does not depend on the backend.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from multigrad.common.errors import distinct_names


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of a tensor. The norm and the largest absolute value are those of its finite elements."""

    norm: float
    """The square root of the sum of squares."""
    largest: float
    """The largest absolute value."""
    zeros: float
    """The fraction of elements that are zero, from 0 to 1."""
    nans: float
    """The fraction of elements that are NaN."""
    infinities: float
    """The fraction of elements that are infinite."""
    size: int
    """The number of elements."""

    @property
    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return not self.nans and not self.infinities

    @property
    def flag(self) -> str:
        """Return "NaN" or "Inf" if the tensor contains one, else an empty string."""
        return "NaN" if self.nans else "Inf" if self.infinities else ""


STATISTICS = ("norm", "largest", "zeros", "nans", "infinities")
TENSORS = ("outputs", "upstream", "weights", "gradients")

Table = Mapping[str, GradientStatistics]


@dataclass(frozen=True)
class GradientRecord:
    """The statistics of one step of `fit`.

    Arguments:
        step: the number of the step, starting at 0, in all epochs that the logger has seen.
        scale: the factor of the loss, by which all gradients here have been divided.
        outputs: statistics of the output of each call of a layer, in the order in which the calls returned.
        upstream: statistics of the gradient of the loss with respect to these outputs. A layer without a
            gradient is missing.
        weights: statistics of each trainable weight before the step.
        gradients: statistics of the gradient with respect to each trainable weight, before it is clipped. A
            weight without a gradient is missing.
    """

    step: int
    scale: float
    outputs: Table
    upstream: Table
    weights: Table
    gradients: Table

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients of weights, as one vector."""
        return math.hypot(*[statistics.norm for statistics in self.gradients.values()])

    @property
    def gradient_not_finite(self) -> float:
        """The fraction of elements in the gradients of weights that are NaN or infinite."""
        bad = [(s.nans + s.infinities) * s.size for s in self.gradients.values()]
        return sum(bad) / max(1, sum(s.size for s in self.gradients.values()))


def read(step: int, entry: Mapping[str, Any]) -> GradientRecord:
    """Return the record of a step from the arrays that `Taps.gather` returned."""
    scale = float(entry["scale"])
    (layers,), (weights,) = entry["layers"].items(), entry["weights"].items()
    outputs, upstream = _tables(layers, scale)
    values, gradients = _tables(weights, scale)
    return GradientRecord(step, scale, outputs, upstream, values, gradients)


def _tables(named: tuple[str, np.ndarray], scale: float) -> tuple[Table, Table]:
    """Return the statistics of values, and of their gradients, by name."""
    joined, rows = named
    rows = rows.astype("float64")
    rows = rows if rows.ndim == 4 else rows[None]  # a leading axis for replicas
    names = distinct_names(joined.split("\n")) if joined else []
    pairs = [(name, rows[:, i, 0], rows[:, i, 1]) for i, name in enumerate(names)]
    values = {name: _merge(value, 1.0) for name, value, _ in pairs}
    return values, {name: _merge(row, scale) for name, _, row in pairs if row[:, -1].any()}


def _merge(rows: np.ndarray, scale: float) -> GradientStatistics:
    """Return the statistics of a tensor whose parts are on several replicas."""
    size = rows[:, 5].sum()
    zeros, nans, infinities = (min(1.0, float(count / size)) for count in rows[:, 2:5].sum(0))
    norm, largest = math.hypot(*rows[:, 0]) / scale, float(rows[:, 1].max()) / scale
    return GradientStatistics(norm, largest, zeros, nans, infinities, round(size))


def diagnose(record: GradientRecord, overflow_is_handled: bool) -> str | None:
    """Return a line that names the first NaN or Inf of a step, or None.

    Arguments:
        record: the record of the step.
        overflow_is_handled: whether the optimizer skips a step whose scaled gradients overflow.
    """
    for path, statistics in record.weights.items():
        if flag := statistics.flag:
            return f"Step {record.step}: {flag} is in the weight {path} before the step."
    for path, statistics in record.outputs.items():
        if flag := statistics.flag:
            return f"Step {record.step}, forward: {flag} first appears in the output of {path}."
    if overflow_is_handled and record.scale > 1:
        return None
    return _diagnose_backward(record)


def _diagnose_backward(record: GradientRecord) -> str | None:
    before = None
    for path, statistics in reversed(list(record.upstream.items())):
        if flag := statistics.flag:
            where = "the loss" if before is None else f"{before} or of an operation between both"
            first = f"{flag} first appears in the upstream gradient at the output of {path}"
            return f"Step {record.step}, backward: {first}, in the derivative of {where}."
        if not any(other.startswith(f"{path}/") for other in record.upstream):
            before = path
    for path, statistics in record.gradients.items():
        if flag := statistics.flag:
            return f"Step {record.step}, backward: {flag} first appears in the gradient of the weight {path}."
    return None
