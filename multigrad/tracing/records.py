"""What a trace has of each call and of each step back: values by their paths, in numbers and in words."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Values = Mapping[str, np.ndarray | None]
"""A NumPy array for each tensor by its path, such as `x` or `tree['b']`; None for a gradient that is none."""


@dataclass(frozen=True)
class Summary:
    """An array in a few numbers, which are None where it has none."""

    shape: tuple[int, ...]
    dtype: str
    mean: float | complex | None = None
    largest: float | None = None
    """The largest absolute value, those that are NaN aside."""
    zeros: float | None = None
    """The share of zeros, from 0 to 1."""
    nans: int = 0
    infinities: int = 0
    value: float | complex | None = None
    """The number itself, where it is one."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def summary_of(array: np.ndarray) -> Summary:
    """An array in a few numbers.

    ```python
    summary = summary_of(np.array([0.0, -3.0]))
    print(summary.mean, summary.largest, summary.zeros)
    # -1.5 3.0 0.5
    ```
    """
    shape, dtype = array.shape, str(array.dtype)
    if array.dtype.kind in "OSU" or not array.size:
        return Summary(shape, dtype)
    # In double precision: what is there need not overflow in its own mean.
    wide = array.astype("complex128" if array.dtype.kind == "c" else "float64")
    with np.errstate(all="ignore"):
        mean, sizes = wide.mean().item(), np.abs(wide)
    nans = np.isnan(wide)
    return Summary(
        shape,
        dtype,
        mean,
        None if nans.all() else float(sizes[~nans].max()),
        float((wide == 0).mean()),
        int(nans.sum()),
        int(np.isinf(wide).sum()),
        wide.item() if not shape else None,
    )


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an op, in a trace.

    Arguments:
        op: the op's name.
        number: the call's number in the trace, from 1, in the order in which the calls came to their end.
        within: the name of the op in whose function or rule it was called, if it was.
        inputs: the tensors among the arguments, and behind them the variables that the function read.
        outputs: the tensors in the output.
    """

    op: str
    number: int
    within: str | None
    inputs: Values
    outputs: Values

    @property
    def title(self) -> str:
        """The number and the name."""
        return f"{self.number} {self.op}"

    @cached_property
    def flags(self) -> list[str]:
        """What is wrong with the values, in words."""
        return [*_not_finite("input ", self.inputs), *_not_finite("", self.outputs)]


@dataclass(frozen=True, eq=False)
class Step:
    """One run of an op's rule, in a trace: a step of the gradient on its way back.

    Arguments:
        of: the call that it belongs to.
        upstream: the gradient of each tensor in the output, None for one that has none.
        downstream: the gradient of each input as the rule's answer was read; None for one that is zero, or
            that nobody asked for.
        exploding: how many times larger than before a gradient is called exploding.
        first: the largest upstream gradient of the trace's first step, if there is one before.
    """

    of: Call
    upstream: Values
    downstream: Values
    exploding: float
    first: float | None

    @cached_property
    def current(self) -> dict[str, float | complex]:
        """The op's own derivative by each input, `downstream / upstream`, where both are scalars."""
        arriving = [u for u in self.upstream.values() if u is not None]
        if len(arriving) != 1 or arriving[0].shape or not arriving[0]:
            return {}
        with np.errstate(all="ignore"):
            return {
                path: (summary_of(gradient).value or 0.0) / (summary_of(arriving[0]).value or 1.0)
                for path, gradient in self.downstream.items()
                if gradient is not None and not gradient.shape
            }

    @cached_property
    def flags(self) -> list[str]:
        """What is wrong with the gradients, in words, with the measure that says so."""
        flags = [*_not_finite("upstream of ", self.upstream), *_not_finite("downstream of ", self.downstream)]
        before, after = largest_of(self.upstream), largest_of(self.downstream)
        if before == 0.0:
            flags.append("all zero: every upstream gradient that arrives")
        elif after == 0.0:
            flags.append("all zero: every downstream gradient, where upstream is not: it ends here")
        return [*flags, *self._exploding(before, after)]

    def _exploding(self, before: float | None, after: float | None) -> Iterator[str]:
        named = {"its largest upstream": before, "the first step's largest upstream": self.first}
        for name, earlier in named.items():
            if earlier and after is not None and earlier * self.exploding < after < math.inf:
                yield f"exploding: the largest downstream, {after:.3g}, is {after / earlier:.3g} times {name}"
                return


def largest_of(values: Values) -> float | None:
    """The largest absolute value in all of them, None where there is none."""
    own = [summary_of(array).largest for array in values.values() if array is not None]
    return max([largest for largest in own if largest is not None], default=None)


def _not_finite(what: str, values: Values) -> Iterator[str]:
    for path, array in values.items():
        if array is not None:
            summary = summary_of(array)
            for word, count in (("NaN", summary.nans), ("Inf", summary.infinities)):
                if count:
                    yield f"{word}: {count} of {summary.size} in {what}{path}"


def as_dict(calls: Sequence[Call], steps: Sequence[Step]) -> dict[str, Any]:
    """Plain data that JSON can write; see `Trace.to_dict`."""
    return {
        "calls": [
            {
                "op": call.op,
                "call": call.number,
                "within": call.within,
                "inputs": _plain(call.inputs),
                "outputs": _plain(call.outputs),
                "flags": list(call.flags),
            }
            for call in calls
        ],
        "steps": [
            {
                "op": step.of.op,
                "call": step.of.number,
                "upstream": _plain(step.upstream),
                "current": {path: _number(value) for path, value in step.current.items()},
                "downstream": _plain(step.downstream),
                "flags": list(step.flags),
            }
            for step in steps
        ],
    }


def _plain(values: Values) -> dict[str, Any]:
    return {
        path: None if array is None else _plain_summary(summary_of(array)) for path, array in values.items()
    }


def _plain_summary(summary: Summary) -> dict[str, Any]:
    numbers = ("mean", "largest", "zeros", "nans", "infinities", "value")
    plain: dict[str, Any] = {"shape": list(summary.shape), "dtype": summary.dtype}
    return plain | {name: _number(getattr(summary, name)) for name in numbers}


def _number(value: float | complex | None) -> float | str | None:
    """A number as JSON has it: NaN, Inf and complex numbers, which it has not, as what Python reads back."""
    plain = value is None or (not isinstance(value, complex) and math.isfinite(value))
    return value if plain else str(value)  # type: ignore[return-value]
