"""Check that a rule is linear in its upstream gradient.

Forward mode is computed as the transpose of the rule, which exists only if the rule is linear. Every
vector-Jacobian product is linear. A rule that clips or normalizes its upstream gradient, or adds to it, is
not linear.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from multigrad.core.errors import message

FAR = -300.0
"""The factor between two upstream gradients that a check compares: large enough to reach most clips, and
negative to reach branches on the sign."""

_ROUNDING = 0.05
"""The rounding error that a check tolerates in a sum, relative to the sum of absolute values. It covers half
precision."""


def trial(shape: Sequence[int]) -> np.ndarray:
    """Return an upstream gradient for a check. Its elements differ, because some rules are zero at ones."""
    return np.cos(np.arange(math.prod(shape))).reshape(shape)


def agree(a: float, b: float, scale: float) -> bool:
    """Return whether two sums are equal up to rounding. `scale` is the sum of absolute values of their terms.

    NaN and infinity agree with every number, because they say nothing about linearity.
    """
    return not abs(a - b) > _ROUNDING * scale


def require_linear(
    op: str, near: Sequence[Any], far: Sequence[Any], read: Callable[[Any], np.ndarray | None]
) -> None:
    """Check that the gradients for `FAR * upstream` are `FAR` times the gradients for `upstream`.

    Arguments:
        op: the name of the op in the error message.
        near: the gradients for `upstream`, None for gradients that are not needed.
        far: the gradients for `FAR * upstream`.
        read: returns the concrete value of a scalar or of a batch of scalars, None if it is traced.

    Raises:
        ValueError: if the gradients are not proportional.
    """
    difference = near_size = far_size = 0.0
    for a, b in zip(near, far, strict=True):
        if a is not None and b is not None:
            sizes = [read(ops.sum(ops.abs(tensor))) for tensor in (FAR * a - b, a, b)]
            totals = [float(np.sum(size)) for size in sizes if size is not None]
            difference, near_size, far_size = (
                difference + totals[0],
                near_size + totals[1],
                far_size + totals[2],
            )
    if not agree(difference, 0.0, far_size - FAR * near_size):
        factor = f"{far_size / near_size:.6g}" if near_size else "infinitely many"
        raise not_linear(op, f"gradients {factor} times as large for {-FAR:g} times the upstream gradient")


def not_linear(op: str, got: str) -> ValueError:
    """Return the error for a rule that is not linear, in forward mode."""
    return ValueError(
        message(
            op,
            "forward mode is undefined, because a rule is not linear in its upstream gradient",
            required="rules that multiply the upstream gradient by factors that do not depend on it",
            got=got,
            fix="use reverse mode (multigrad.grad, multigrad.vjp), or make the rule linear",
        )
    )
