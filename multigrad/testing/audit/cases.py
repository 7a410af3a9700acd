"""The form of the audit's table: an op, the points at which it is differentiated, and what is known there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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
    width: int = 0
    """The size of the arrays in which the values of a scalar are computed. The programs of JAX are reused."""


def elementwise(
    op: str,
    *points: float | Sequence[float],
    known: Mapping[Any, Known] | None = None,
    call: Call | None = None,
    half: float | Sequence[float] | None = 0.75,
    orders: tuple[int, ...] = (1, 2),
) -> list[Case]:
    """Return the cases of an elementwise op: its points at once, an empty array, a scalar and float16.

    Arguments:
        op: the name of the op.
        points: a number, or one number per argument.
        known: what is known at some points.
        call: calls the op. The default passes the arguments.
        half: the point for float16 and for the scalar, where the function is smooth.
        orders: the orders of the derivatives.
    """
    call = call or _plain(op)
    table = {} if known is None else known
    rows = [_row(point) for point in (*points, *(p for p in table if p not in points))]
    knowns = {_row(point): what for point, what in table.items()}
    names = tuple(", ".join(f"{number:g}" for number in row) for row in rows)
    found = tuple(knowns.get(row, Known()) for row in rows)
    columns = tuple(np.array(column) for column in zip(*rows, strict=True))
    cases = [Case(op, call, columns, names, found, True, orders=orders)]
    empty = tuple(np.zeros(0) for _ in columns)
    cases.append(Case(op, call, empty, ("empty",), (Known(first=[[]] * len(columns)),), orders=(1,)))
    if half is not None:
        scalar = tuple(np.array(number) for number in _row(half))
        for name, dtype in (("0-d", "float32"), ("float16", "float16")):
            cases.append(Case(op, call, scalar, (name,), (Known(),), False, dtype, (1,), len(rows)))
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
) -> Case:
    """Return a case with one point, which is the value of all arguments."""
    arrays = tuple(np.asarray(arg, "float64") for arg in args)
    known = Known(first, choice, second)
    return Case(op, call or _plain(op), arrays, (point,), (known,), dtype=dtype, orders=orders)


def _plain(op: str) -> Call:
    return lambda ops, *args: getattr(ops, op)(*args)


def _row(point: Any) -> tuple[float, ...]:
    return tuple(map(float, point)) if isinstance(point, (tuple, list)) else (float(point),)
