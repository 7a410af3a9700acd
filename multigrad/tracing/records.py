"""The data of a trace: a `CallRecord` for each call of an op, a `StepRecord` for each run of a rule, their
flags, and their export as plain data.

Arrays are NumPy arrays. Nothing here knows a backend or an open trace.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Values = Mapping[str, np.ndarray | None]
"""A NumPy array for each tensor, by its path, such as `x` or `tree['b']`, and None for a missing gradient."""


@dataclass(frozen=True)
class Summary:
    """Statistics of an array. They are None for an array that is empty or not numeric."""

    shape: tuple[int, ...]
    dtype: str
    mean: float | complex | None = None
    """The mean of the finite elements."""
    largest: float | None = None
    """The largest absolute value, ignoring NaN."""
    zeros: float | None = None
    """The fraction of elements that are zero, from 0 to 1."""
    nans: int = 0
    infinities: int = 0
    value: float | complex | None = None
    """The element of a scalar, None for other shapes."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def summarize(array: np.ndarray) -> Summary:
    """Compute statistics of an array.

    ```python
    summary = summarize(np.array([0.0, -3.0]))
    print(summary.mean, summary.largest, summary.zeros)
    # -1.5 3.0 0.5
    ```
    """
    shape, dtype = array.shape, str(array.dtype)
    if array.dtype.kind in "OSU" or not array.size:
        return Summary(shape, dtype)
    # Double precision, because the sum of finite elements can overflow in their own dtype.
    wide = array.astype("complex128" if array.dtype.kind == "c" else "float64")
    with np.errstate(all="ignore"):
        finite, magnitudes = wide[np.isfinite(wide)], np.abs(wide)
        mean = finite.mean().item() if finite.size else None
    nans = np.isnan(wide)
    return Summary(
        shape,
        dtype,
        mean,
        None if nans.all() else float(magnitudes[~nans].max()),
        float((wide == 0).mean()),
        int(nans.sum()),
        int(np.isinf(wide).sum()),
        wide.item() if not shape else None,
    )


@dataclass(frozen=True, eq=False)
class CallRecord:
    """One call of an op in a trace.

    Arguments:
        op: the name of the op.
        number: the number of the call, starting at 1, in the order in which calls return.
        within: the name of the op whose function or rule made this call, or None.
        inputs: the tensor arguments, followed by the variables that the function read.
        outputs: the tensors in the output.
        layer: the name of the class of a layer; empty for an op.
    """

    op: str
    number: int
    within: str | None
    inputs: Values
    outputs: Values
    layer: str = ""

    @property
    def title(self) -> str:
        """The number and the name, as in `3 square`."""
        return f"{self.number} {self.op}"

    @cached_property
    def flags(self) -> list[str]:
        """Warnings about the inputs and outputs: NaN and infinite elements."""
        return [*_flag_not_finite("input ", self.inputs), *_flag_not_finite("", self.outputs)]


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One run of the rule of an op in a trace: one step of the backward pass.

    Arguments:
        call: the call whose rule ran.
        upstream: the gradient of each tensor in the output, None if it has none.
        downstream: the gradient that the rule returned for each input, None if it is zero or not needed.
        exploding: the factor by which a gradient must grow to be flagged as exploding.
        first_upstream: the largest absolute value in the upstream gradient of the first step of the trace,
            None for the first step itself.
    """

    call: CallRecord
    upstream: Values
    downstream: Values
    exploding: float
    first_upstream: float | None

    @cached_property
    def current(self) -> dict[str, float | complex]:
        """The derivative with respect to each input, `downstream / upstream`, if both are scalars."""
        upstream = [array for array in self.upstream.values() if array is not None]
        if len(upstream) != 1 or upstream[0].shape or not upstream[0]:
            return {}
        with np.errstate(all="ignore"):
            return {
                path: (summarize(gradient).value or 0.0) / (summarize(upstream[0]).value or 1.0)
                for path, gradient in self.downstream.items()
                if gradient is not None and not gradient.shape
            }

    @cached_property
    def flags(self) -> list[str]:
        """Warnings about the gradients: NaN, infinite, all zero or exploding."""
        flags = [
            *_flag_not_finite("upstream of ", self.upstream),
            *_flag_not_finite("downstream of ", self.downstream),
        ]
        upstream, downstream = largest_magnitude(self.upstream), largest_magnitude(self.downstream)
        if upstream == 0.0:
            flags.append("all zero: every upstream gradient")
        elif downstream == 0.0:
            flags.append("all zero: every downstream gradient, although upstream is not zero")
        return [*flags, *self._flag_exploding(upstream, downstream)]

    def _flag_exploding(self, upstream: float | None, downstream: float | None) -> Iterator[str]:
        role, largest, references = "upstream", upstream, {"that of the first step": self.first_upstream}
        if self.downstream:  # not a layer
            name = "the largest upstream gradient"
            references = {name: upstream, f"{name} of the first step": self.first_upstream}
            role, largest = "downstream", downstream
        for name, reference in references.items():
            if reference and largest is not None and reference * self.exploding < largest < math.inf:
                grown = f"{largest:.3g}, is {largest / reference:.3g} times {name}"
                yield f"exploding: the largest {role} gradient, {grown}"
                return


def largest_magnitude(values: Values) -> float | None:
    """Return the largest absolute value in all arrays, ignoring NaN, or None if there is none."""
    magnitudes = [summarize(array).largest for array in values.values() if array is not None]
    return max([magnitude for magnitude in magnitudes if magnitude is not None], default=None)


def _flag_not_finite(role: str, values: Values) -> Iterator[str]:
    for path, array in values.items():
        if array is not None:
            summary = summarize(array)
            for word, count in (("NaN", summary.nans), ("Inf", summary.infinities)):
                if count:
                    yield f"{word}: {count} of {summary.size} in {role}{path}"


def as_dict(calls: Sequence[CallRecord], steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return calls and steps as data that `json.dumps` accepts, in the format of `Trace.to_dict`."""
    return {
        "calls": [
            {
                "op": call.op,
                "call": call.number,
                "within": call.within,
                "inputs": _values_as_dict(call.inputs),
                "outputs": _values_as_dict(call.outputs),
                "flags": list(call.flags),
            }
            for call in calls
        ],
        "steps": [
            {
                "op": step.call.op,
                "call": step.call.number,
                "upstream": _values_as_dict(step.upstream),
                "current": {path: _as_json(value) for path, value in step.current.items()},
                "downstream": _values_as_dict(step.downstream),
                "flags": list(step.flags),
            }
            for step in steps
        ],
    }


def _values_as_dict(values: Values) -> dict[str, Any]:
    plain = {path: None if array is None else vars(summarize(array)) for path, array in values.items()}
    return {p: v and {name: _as_json(value) for name, value in v.items()} for p, v in plain.items()}


def _as_json(value: Any) -> Any:
    """Return a value for JSON. NaN, Inf and complex numbers become strings that Python can parse."""
    if isinstance(value, tuple):
        return list(value)
    is_special = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_special else value
