"""The form of the audit's table: an op, the points at which it is differentiated, and what is known there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

ROW = np.array([0.5, -1.0, 2.0, 0.75])
MATRIX = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
SQUARE = np.array([[2.0, 0.5, -1.0], [0.25, 1.5, 0.75], [-0.5, 1.0, 3.0]])
SINGULAR = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]])  # rank 2
RANK_ONE = np.outer([1.0, 2.0, -1.0], [1.0, 0.5, 2.0])
SPREAD = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 4.0]])  # symmetric, distinct eigenvalues
TIES = np.array([1.0, 3.0, 3.0, -2.0])
IMAGE = np.arange(16.0).reshape(1, 4, 4, 1) * 0.25 - 1.5

Call = Callable[..., Any]
"""A function of the audited module and the arguments of a case, which calls the op."""


class Known(NamedTuple):
    """What a formula states at a point. An item of None is computed with finite differences.

    The items are numbers, or nested sequences with one item per argument.
    """

    first: Any = None
    """The first derivative."""
    choice: Any = None
    """multigrad's convention for the first derivative, where the function has none."""
    second: Any = None
    """The second derivative. At a convention, it is 0 unless this says otherwise."""


@dataclass(frozen=True)
class Case:
    """A call of an op, with one or several points."""

    op: str
    call: Call
    args: tuple[np.ndarray, ...]
    """The arguments that are differentiated, in float64."""
    points: tuple[str, ...]
    """The name of the point. An elementwise case has one for each element."""
    known: tuple[Known, ...]
    """What is known at each point."""
    elementwise: bool = False
    """Whether each element of the output depends only on the same element of each argument."""
    dtype: str = "float32"
    """The dtype in which the backend differentiates."""
    orders: tuple[int, ...] = (1, 2)
    """The orders of the derivatives."""
    formula: Callable[..., Any] | None = None
    """A function of arrays that returns the value of the op. Without it, Keras's op computes the values."""
    width: int = 0
    """The size of the arrays in which the values of a scalar are computed. The programs of JAX are reused."""


def elementwise(
    op: str,
    *points: float | Sequence[float],
    known: Mapping[Any, Known] | None = None,
    call: Call | None = None,
    half: float | Sequence[float] | None = 0.75,
    orders: tuple[int, ...] = (1, 2),
    suffix: str = "",
) -> list[Case]:
    """Return the cases of an elementwise op: its points at once, and an empty array, a scalar and float16.

    Arguments:
        op: the name of the op.
        points: a number, or one number per argument.
        known: what is known at some points.
        call: calls the op. The default passes the arguments.
        half: the point for float16 and for the scalar, where the function is smooth. None leaves out these
            cases, and the empty array.
        orders: the orders of the derivatives.
        suffix: is added to the names of the points.
    """
    call = call or passing(op)
    table = {} if known is None else known
    rows = [_row(point) for point in (*points, *(p for p in table if p not in points))]
    knowns = {_row(point): what for point, what in table.items()}
    names = tuple(", ".join(f"{number:g}" for number in row) + suffix for row in rows)
    found = tuple(knowns.get(row, Known()) for row in rows)
    columns = tuple(np.array(column) for column in zip(*rows, strict=True))
    cases = [Case(op, call, columns, names, found, True, orders=orders)]
    if half is not None:
        empty = tuple(np.zeros(0) for _ in columns)
        cases.append(
            Case(op, call, empty, (f"empty{suffix}",), (Known(first=[[]] * len(columns)),), orders=(1,))
        )
        scalar = tuple(np.array(number) for number in _row(half))
        for name, dtype in (("0-d", "float32"), ("float16", "float16")):
            cases.append(
                Case(op, call, scalar, (name + suffix,), (Known(),), False, dtype, (1,), width=len(rows))
            )
    return cases


def whole(
    op: str,
    point: str,
    *args: Any,
    call: Call | None = None,
    first: Any = None,
    choice: Any = None,
    second: Any = None,
    dtype: str = "float32",
    orders: tuple[int, ...] = (1, 2),
    formula: Callable[..., Any] | None = None,
) -> Case:
    """Return a case with one point, which is the value of all arguments."""
    arrays = tuple(np.asarray(arg, "float64") for arg in args)
    known = (Known(first, choice, second),)
    return Case(op, call or passing(op), arrays, (point,), known, False, dtype, orders, formula)


def _row(point: Any) -> tuple[float, ...]:
    return tuple(map(float, point)) if isinstance(point, (tuple, list)) else (float(point),)


def weights(count: int, index: int = 0) -> np.ndarray:
    """Return the weights of an output in the audit's loss."""
    return 1.0 + 0.5 * np.sin(1.0 + 3.0 * index + 2.0 * np.arange(count))


def passing(op: str, **options: Any) -> Call:
    """Return a call that passes the arguments and options to the op."""
    return lambda ops, *args: attrgetter(op)(ops)(*args, **options)
