"""The audit's points of elementwise ops.

A number is a point, and a pair is a point of an op of two arguments. `Known` states what finite differences
cannot find: a convention where the function has no derivative, and infinite derivatives.
"""

import math
from dataclasses import replace
from typing import Any

from audit.cases import Call, Case, Known, elementwise, passing
from multigrad.ops.dtypes import dtype_of

INF = math.inf
USUAL = (0.0, 1.0, -1.0, 0.5, -2.0, 30.0, -30.0)
POSITIVE = (1.0, 0.5, 2.0, 30.0)
INSIDE = (0.0, 0.5, -0.5)  # of the open interval from -1 to 1
PAIRS = ((0.5, 2.0), (-2.0, 0.5), (1.0, 1.0), (-1.0, 1.0), (0.0, 1.0))

FLAT_AT_INF = {INF: Known(first=0.0, second=0.0), -INF: Known(first=0.0, second=0.0)}
ONE_AT_INF = {INF: Known(first=1.0, second=0.0), -INF: Known(first=0.0, second=0.0)}


def choices(*points: tuple[float, float] | tuple[float, float, float]) -> dict[float, Known]:
    """Return the conventions at some points: the point, the first and perhaps the second derivative."""
    return {
        point: Known(choice=first, second=second[0] if second else None) for point, first, *second in points
    }


def elementwise_cases() -> list[Case]:
    """Return the cases of elementwise ops."""
    cases: list[Case] = []
    for part in (_of_numpy(), activations(), _of_pairs(), _of_complex_numbers()):
        cases += part
    return cases


def _of_numpy() -> list[Case]:
    zero = choices((0.0, 0.0))
    infinite = {0.0: Known(first=INF)}
    cases: list[Case] = []
    for op in ("abs", "absolute", "fabs"):
        cases += elementwise(op, *USUAL, known=zero | {INF: Known(first=1.0), -INF: Known(first=-1.0)})
    for op in ("sin", "cos", "sinh", "cosh", "exp", "exp2", "expm1", "square", "arcsinh", "erf", "erfc"):
        cases += elementwise(op, *USUAL)
    for op in ("erf", "erfc"):
        cases += elementwise(op, known=FLAT_AT_INF, half=None)
    cases += elementwise("i0", 0.0, 1.0, -1.0, 0.5, -2.0)
    for op in ("arctan", "tanh"):
        cases += elementwise(op, *USUAL, known=FLAT_AT_INF)
    for op in ("exp", "exp2", "expm1"):
        cases += elementwise(op, known={-INF: Known(first=0.0, second=0.0)}, half=None)
    for op in ("log", "log2", "log10"):
        cases += elementwise(op, *POSITIVE, known=infinite)
    cases += elementwise("log1p", 0.0, *POSITIVE, known={-1.0: Known(first=INF)})
    cases += elementwise("sqrt", *POSITIVE, known=infinite | {INF: Known(first=0.0)})
    cases += elementwise("cbrt", *POSITIVE, -1.0, -8.0, known=infinite)
    cases += elementwise("rsqrt", *POSITIVE, known={0.0: Known(first=-INF), INF: Known(first=0.0)})
    cases += elementwise("reciprocal", *POSITIVE, -2.0, known={INF: Known(first=0.0)})
    cases += elementwise("tan", 0.0, 1.0, -1.0, 30.0)
    cases += elementwise("arcsin", *INSIDE, known={1.0: Known(first=INF), -1.0: Known(first=INF)})
    cases += elementwise("arccos", *INSIDE, known={1.0: Known(first=-INF), -1.0: Known(first=-INF)})
    cases += elementwise("arctanh", *INSIDE, known={1.0: Known(first=INF), -1.0: Known(first=INF)})
    cases += elementwise("arccosh", 2.0, 30.0, known={1.0: Known(first=INF)}, half=1.5)
    cases += elementwise("erfinv", *INSIDE, known={1.0: Known(first=INF), -1.0: Known(first=INF)})
    cases += elementwise("sinc", *USUAL, known={INF: Known(first=0.0), -INF: Known(first=0.0)})
    for op in ("negative", "conj", "conjugate", "real", "deg2rad", "rad2deg", "copy", "nan_to_num"):
        cases += elementwise(op, *USUAL)
    # Steps: the derivative is zero between the jumps, and by convention at a jump.
    for op in ("floor", "ceil", "trunc", "round", "sign"):
        cases += elementwise(op, 0.25, -0.75, known=choices((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (-1.0, 0.0)))
    cases += elementwise("saturate_cast", *USUAL, call=lambda ops, x: ops.saturate_cast(x, x.dtype))
    cases += elementwise("ldexp", *USUAL, call=lambda ops, x: ops.ldexp(x, 3))
    # The second argument of `heaviside` is the value at zero.
    cases += elementwise("heaviside", 0.5, -2.0, known=zero, call=lambda ops, x: ops.heaviside(x, 0.5))
    cases += elementwise("angle", 0.5, -2.0, known=zero)
    cases += elementwise(
        "clip",
        0.5, -2.0, 30.0,
        known=choices((1.0, 1.0), (-1.0, 1.0)) | FLAT_AT_INF,
        call=lambda ops, x: ops.clip(x, -1.0, 1.0),
    )  # fmt: skip
    cases += elementwise("nan_to_num", known=choices((INF, 0.0), (-INF, 0.0)), half=None, orders=(1,))
    return cases


def activations() -> list[Case]:
    """Return the cases of elementwise activations."""
    zero = choices((0.0, 0.0))
    cases: list[Case] = []
    cases += elementwise("relu", *USUAL, known=zero)
    cases += elementwise("relu6", 1.0, -2.0, 5.0, 30.0, known=choices((0.0, 0.0), (6.0, 0.0)))
    cases += elementwise("leaky_relu", *USUAL, known=choices((0.0, 0.2)))
    cases += elementwise("elu", *USUAL, known=ONE_AT_INF | choices((0.0, 1.0, 1.0)))
    cases += elementwise("celu", *USUAL, known=ONE_AT_INF | choices((0.0, 1.0, 1.0)))
    selu = 1.0507009873554805 * 1.6732632423543772
    cases += elementwise("selu", *USUAL, known=choices((0.0, selu, selu)))
    cases += elementwise("sigmoid", *USUAL, 100.0, -100.0, known=FLAT_AT_INF)
    for op in ("softplus", "squareplus", "log_sigmoid", "softsign", "tanh_shrink", "silu", "swish", "gelu"):
        known = {0.0: Known(choice=1.0, second=0.0)} if op == "softsign" else {}
        cases += elementwise(op, *USUAL, 100.0, -100.0, known=known)
    cases += elementwise("softplus", known=ONE_AT_INF, half=None)
    exact = passing("gelu", approximate=False)
    cases += elementwise("gelu", *USUAL, 100.0, -100.0, call=exact, suffix=", exact")
    cases += elementwise("hard_sigmoid", 0.0, 1.0, -30.0, 30.0, known=choices((3.0, 0.0), (-3.0, 0.0)))
    for op in ("hard_silu", "hard_swish"):
        known = choices((3.0, 1.5 - 0.5, 0.0), (-3.0, 0.0, 0.0))
        cases += elementwise(op, 0.0, 1.0, -30.0, 30.0, known=known)
    cases += elementwise("hard_tanh", 0.0, 0.5, -2.0, 30.0, known=choices((1.0, 0.0), (-1.0, 0.0)))
    shrink = choices((0.5, 0.0), (-0.5, 0.0))
    cases += elementwise("hard_shrink", 0.0, 1.0, -2.0, 30.0, known=shrink)
    cases += elementwise("soft_shrink", 0.0, 1.0, -2.0, 30.0, known=shrink)
    cases += elementwise("sparse_sigmoid", 0.0, 0.5, -2.0, 30.0, known=choices((1.0, 0.0), (-1.0, 0.0)))
    sparse_plus = choices((1.0, 1.0, 0.0), (-1.0, 0.0, 0.0))
    cases += elementwise("sparse_plus", 0.0, 0.5, -2.0, 30.0, known=sparse_plus)
    cases += elementwise(
        "threshold", 0.5, -2.0, known=choices((1.0, 0.0)), call=lambda ops, x: ops.threshold(x, 1.0, 7.0)
    )
    return cases


def _of_pairs() -> list[Case]:
    tie = ((1.0, 1.0), (0.0, 0.0), (-2.0, -2.0))
    half, zero = Known(choice=(0.5, 0.5)), Known(choice=(0.0, 0.0))
    pair = (0.75, 1.5)
    cases: list[Case] = []
    for op in ("add", "subtract", "multiply", "true_divide", "divide"):
        cases += elementwise(op, *PAIRS, (2.0, -3.0), half=pair)
    cases += elementwise("multiply", (0.0, 0.0), half=None)
    cases += elementwise("divide_no_nan", *PAIRS, known={(0.0, 0.0): zero, (1.0, 0.0): zero}, half=pair)
    for op in ("maximum", "minimum", "fmax", "fmin"):
        known = dict.fromkeys(tie, half)
        known[1.0, INF] = Known(first=(0.0, 1.0) if op in ("maximum", "fmax") else (1.0, 0.0))
        cases += elementwise(op, (0.5, 2.0), (-2.0, 0.5), (0.0, 1.0), known=known, half=pair)
    symmetric = {(a * s, a * t): Known() for a in (1.0, 2.0) for s in (1.0, -1.0) for t in (1.0, -1.0)}
    hypot = symmetric | {
        (0.0, 0.0): zero,
        (3e30, 4e30): Known(first=(0.6, 0.8), second=(0.0, 0.0)),
        (3e-30, 4e-30): Known(first=(0.6, 0.8)),
        (INF, 1.0): Known(first=(1.0, 0.0), second=(0.0, 0.0)),
        (1.0, -INF): Known(first=(0.0, -1.0), second=(0.0, 0.0)),
    }
    cases += elementwise("hypot", (3.0, 4.0), (0.0, 2.0), (-2.0, 0.0), known=hypot, half=pair)
    for op in ("logaddexp", "logaddexp2"):
        known = {
            (-INF, 1.0): Known(first=(0.0, 1.0), second=(0.0, 0.0)),
            (1.0, -INF): Known(first=(1.0, 0.0), second=(0.0, 0.0)),
            (INF, 1.0): Known(first=(1.0, 0.0)),
            (1.0, INF): Known(first=(0.0, 1.0)),
        }
        if op == "logaddexp":
            known[(-INF, -INF)] = half
        cases += elementwise(op, (0.5, 2.0), (100.0, 1.0), (1.0, 100.0), *tie, known=known, half=pair)
    cases += elementwise(
        "arctan2", *PAIRS, (0.0, 2.0), (1.0, 0.0), (-2.0, 0.0), known={(0.0, 0.0): zero}, half=pair
    )
    flat = {(1.0, INF): Known(first=(0.0, 0.0)), (1e-30, 1e-30): Known(first=(5e29, -5e29))}
    cases += elementwise("arctan2", known=flat, half=None, orders=(1,))
    cases += elementwise(
        "clip",
        (0.5, 0.0, 1.0), (-2.0, 0.0, 1.0), (2.0, 0.0, 1.0), (0.25, 2.0, 1.0), (3.0, 2.0, 1.0),
        half=None,
    )  # fmt: skip
    # x - y * trunc(x / y) and x - y * floor(x / y). At a jump, the derivative is that between the jumps.
    jump = {(4.0, 2.0): Known(choice=(1.0, -2.0)), (0.0, 2.0): Known(choice=(1.0, 0.0))}
    cases += elementwise(
        "fmod", (5.0, 3.0), (-5.0, 3.0), (1.0, 3.0), (0.5, -2.0), (7.0, 2.0), known=jump, half=pair
    )
    cases += elementwise(
        "mod", (5.0, 3.0), (-5.0, 3.0), (1.0, 3.0), (0.5, -2.0), (7.0, 2.0), known=jump, half=pair
    )
    flat = {(4.0, 2.0): Known(choice=(0.0, 0.0)), (0.0, 2.0): Known(choice=(0.0, 0.0))}
    cases += elementwise("floor_divide", (5.0, 3.0), (-5.0, 3.0), (0.5, -2.0), known=flat, half=pair)
    cases += elementwise("power", (2.0, 3.0), (0.5, -1.0), (30.0, 2.0), (1.0, 0.0), half=pair)
    for exponent, slope, second in ((2.0, 0.0, 2.0), (1.0, 1.0, 0.0), (3.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        cases += elementwise(
            "power",
            -2.0,
            known={0.0: Known(first=slope, second=second)},
            call=lambda ops, x, exponent=exponent: ops.power(x, exponent),
            half=None,
            suffix=f" to the power {exponent:g}",
        )
    cases += elementwise(
        "power",
        1.0,
        known={0.0: Known(first=0.0, second=0.0)},
        call=lambda ops, x: ops.power(0.0, x),
        half=None,
        suffix=" as the power of 0",
    )
    cases += elementwise(
        "polar",
        (2.0, 0.5),
        (0.0, 1.0),
        (1.0, 0.0),
        call=lambda ops, r, a: ops.real(ops.polar(r, a)),
        half=None,
    )
    return cases


def _of_complex_numbers() -> list[Case]:
    """Return the cases of functions of a complex number `x + i y`, with respect to `x` and `y`."""
    zero = Known(choice=(0.0, 0.0))

    def complex_call(op: str) -> Call:
        def call(ops: Any, x: Any, y: Any) -> Any:
            z = getattr(ops, op)(complex_number(ops, x, y))
            return z if op in ("abs", "absolute", "angle") else ops.real(z) + 2.0 * ops.imag(z)

        return call

    cases: list[Case] = []
    points = ((3.0, 4.0), (0.0, 2.0), (-2.0, 0.5), (1.0, 0.0))
    for op in ("abs", "absolute", "angle"):
        cases += elementwise(op, *points, known={(0.0, 0.0): zero}, call=complex_call(op), half=None)
    for op in ("conj", "square", "exp", "sqrt", "log"):
        cases += elementwise(op, *points, call=complex_call(op), half=None)
    return [_rename_points(case) for case in cases]


def complex_number(ops: Any, x: Any, y: Any) -> Any:
    """Return `x + i y`. Keras's `view_as_complex` (3.15) returns complex64 for float64."""
    if dtype_of(x) == "float64":
        return ops.cast(x, "complex128") + 1j * ops.cast(y, "complex128")
    return ops.view_as_complex(ops.stack([x, y], axis=-1))


def _rename_points(case: Case) -> Case:
    """Return the case with names of points as complex numbers."""
    points = tuple(f"{x} + {y}i" for x, y in (name.split(", ") for name in case.points))
    return replace(case, points=points)
