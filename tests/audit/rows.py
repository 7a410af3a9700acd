"""The rows of the audit's table."""

from typing import NamedTuple

FAULTS = ("wrong", "NaN", "error")


class Row(NamedTuple):
    """The verdict on one derivative of an op at a point, on one backend."""

    op: str
    """The name in `keras.ops`."""
    point: str
    """The arguments, or what is special about them."""
    order: int
    """1 for the gradient, 2 for the second derivative."""
    verdict: str
    """One of `right`, `convention`, `other convention`, `wrong`, `NaN` and `error`."""
    got: str
    """The numbers that the backend returned, or its error."""
    truth: str
    """The right numbers, or multigrad's convention."""
