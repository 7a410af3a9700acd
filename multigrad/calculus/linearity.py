"""Whether a rule is linear in its upstream gradient, as its transpose, which is forward mode, requires.

A vector-Jacobian product always is. A rule that clips or normalizes its upstream gradient, or adds to it, is
none, and has no derivative in forward mode.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from multigrad.errors import message

FAR = -300.0
"""A factor to tell by: far out and on the other side, where limits and branches show."""

_ROUNDING = 0.05
"""How much two sums may differ by rounding alone, relative to their parts: in half precision, too."""


def trial(shape: Sequence[int]) -> np.ndarray:
    """An upstream gradient to try a rule on: no two numbers alike, because some rules make ones vanish."""
    return np.cos(np.arange(math.prod(shape))).reshape(shape)


def agree(a: float, b: float, scale: float) -> bool:
    """Whether two numbers are the same up to rounding in a sum of so much."""
    return not abs(a - b) > _ROUNDING * scale  # where one is NaN or infinite, it is not for this to say


def require_linear(
    op: str, near: Sequence[Any], far: Sequence[Any], read: Callable[[Any], np.ndarray | None]
) -> None:
    """See that gradients `far`, for `FAR` times an upstream gradient, are `FAR` times those for it, `near`.

    Arguments:
        op: how messages call the op.
        near, far: the gradients, None for those that nobody needs.
        read: the value of a scalar, or of a batch of scalars.

    Raises:
        ValueError: when they are not.
    """
    off = of_near = of_far = 0.0
    for a, b in zip(near, far, strict=True):
        if a is not None and b is not None:
            parts = [read(ops.sum(ops.abs(part))) for part in (FAR * a - b, a, b)]
            sums = [float(np.sum(part)) for part in parts if part is not None]
            off, of_near, of_far = off + sums[0], of_near + sums[1], of_far + sums[2]
    if not agree(off, 0.0, of_far - FAR * of_near):
        times = f"{of_far / of_near:.6g}" if of_near else "infinitely many"
        raise not_linear(op, f"gradients that are {times} times as large for {-FAR:g} times the upstream")


def not_linear(op: str, got: str) -> ValueError:
    """The error for a rule that is not linear, in forward mode."""
    return ValueError(
        message(
            op,
            "it has no derivative in forward mode, because a rule is not linear in its upstream gradient",
            required="rules that multiply their upstream gradient by what does not depend on it",
            got=got,
            mend="take the derivative in reverse mode, or make the rule linear",
        )
    )
