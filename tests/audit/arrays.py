"""The audit's points of reductions, products and norms."""

import functools
import math

import numpy as np

from audit.cases import MATRIX, ROW, SQUARE, TIES, Case, passing, weights, whole

W = weights(4)


def array_cases() -> list[Case]:
    """Return the cases of reductions, products and norms."""
    return [*_reductions(), *_products_along(), *_products(), *_norms()]


def _reductions() -> list[Case]:
    first = W[0]
    cases = []
    for op in ("max", "min", "amax", "amin", "nanmax", "nanmin"):
        ties = TIES if "max" in op else -TIES
        half = [0.0, first / 2, first / 2, 0.0]
        cases += [whole(op, "regular", ROW), whole(op, "tie", ties, choice=half)]
        cases += [whole(op, "all equal", np.zeros(2), choice=[first / 2, first / 2])]
    cases.append(whole("ptp", "regular", ROW))
    for op in (
        "sum",
        "mean",
        "prod",
        "var",
        "std",
        "logsumexp",
        "median",
        "nansum",
        "nanmean",
        "nanprod",
        "nanvar",
        "nanstd",
        "nanmedian",
    ):
        cases.append(whole(op, "regular", ROW))
        # Keras (3.15) has no `nanmedian` along an axis in a graph of TensorFlow.
        formula = functools.partial(np.nanmedian, axis=0) if op == "nanmedian" else None
        cases.append(whole(op, "matrix, axis 0", MATRIX, call=passing(op, axis=0), formula=formula))
    for op in ("std", "nanstd"):
        cases.append(whole(op, "constant", np.full(3, 2.0), choice=0.0))
        cases.append(whole(op, "zeros", np.zeros(3), choice=0.0))
        cases.append(whole(op, "one element", np.array([2.0]), choice=0.0))
        matrix = np.array([[1.0, 1.0], [1.0, 3.0]])
        known = [[0.0, 0.0], [-0.5 * W[1], 0.5 * W[1]]]
        cases.append(whole(op, "a constant row", matrix, call=passing(op, axis=1), choice=known, orders=(1,)))
    cases.append(whole("var", "constant", np.full(3, 2.0)))
    cases.append(whole("logsumexp", "tie", np.array([1.0, 1.0, 0.0])))
    cases.append(whole("logsumexp", "large", np.array([100.0, 99.0, -100.0])))
    cases.append(
        whole(
            "logsumexp",
            "-inf among others",
            np.array([-math.inf, 1.0, 2.0]),
            first=first * np.array([0.0, 0.26894142, 0.73105858]),
            orders=(1,),
        )
    )
    cases.append(whole("logsumexp", "all -inf", np.full(2, -math.inf), choice=[0.5 * first] * 2, orders=(1,)))
    cases.append(whole("median", "even", np.array([1.0, 4.0, 2.0, 8.0])))
    for op in ("quantile", "nanquantile"):
        cases.append(whole(op, "regular", ROW, call=passing(op, q=0.3)))
    for op in ("percentile", "nanpercentile"):
        cases.append(whole(op, "regular", ROW, call=passing(op, q=30.0)))
    cases.append(
        whole(
            "average",
            "weights",
            ROW,
            np.array([1.0, 2.0, 0.5, 1.5]),
            call=lambda ops, x, w: ops.average(x, weights=w),
        )
    )
    cases.append(whole("sort", "regular", ROW))
    cases.append(whole("sort", "tie", np.array([1.0, 1.0, 0.0]), choice=[W[1], W[2], W[0]]))
    cases.append(whole("top_k", "regular", ROW, call=lambda ops, x: ops.top_k(x, 2)[0]))
    cases.append(whole("trapezoid", "regular", ROW))
    return cases


def _products_along() -> list[Case]:
    """Return the cases of products and sums along an axis."""
    cases = []
    zeros = {"a zero": [2.0, 0.0, 3.0], "two zeros": [2.0, 0.0, 0.0], "a zero first": [0.0, 2.0, 3.0]}
    for op in ("prod", "nanprod", "cumprod", "nancumprod"):
        cases += [whole(op, name, x) for name, x in zeros.items()]
    cases += [whole(op, "zeros", np.zeros(3)) for op in ("prod", "nanprod")]
    cases += [whole(op, "regular", ROW) for op in ("cumsum", "cumprod", "nancumsum", "nancumprod", "diff")]
    return cases


def _products() -> list[Case]:
    left, right = MATRIX, SQUARE[:, :2]
    cases = [whole(op, "regular", left, right) for op in ("matmul", "dot")]
    cases.append(whole("matmul", "zeros", np.zeros((2, 2)), np.zeros((2, 2))))
    cases.append(
        whole(
            "matmul",
            "empty",
            np.zeros((2, 0)),
            np.zeros((0, 2)),
            first=[np.zeros((2, 0)), np.zeros((0, 2))],
            orders=(1,),
        )
    )
    cases.append(whole("matmul", "float16", left, right, dtype="float16", orders=(1,)))
    vectors = ROW[:3], np.array([1.0, -2.0, 0.5])
    cases += [whole(op, "regular", *vectors) for op in ("inner", "outer", "vdot", "cross")]
    cases.append(whole("kron", "regular", *vectors, formula=np.kron))
    cases += [whole("add", "broadcast", MATRIX, ROW[:3]), whole("multiply", "broadcast", MATRIX, ROW[:3])]
    cases.append(whole("hypot", "broadcast", np.ones((2, 1)), np.ones(2)))
    cases.append(whole("logaddexp", "broadcast", np.ones((2, 1)), np.ones(2)))
    w = W.reshape(2, 2)
    cases += [
        whole(
            "maximum",
            "broadcast",
            np.ones((2, 1)),
            np.ones(2),
            choice=[0.5 * w.sum(1, keepdims=True), 0.5 * w.sum(0)],
        ),
        whole("tensordot", "regular", left, SQUARE, call=passing("tensordot", axes=1)),
        whole("einsum", "regular", left, SQUARE, call=lambda ops, a, b: ops.einsum("ij,jk->ik", a, b)),
        whole("correlate", "regular", ROW, ROW[:2]),
        whole("corrcoef", "regular", np.array([[0.5, -1.0, 2.0], [1.5, 0.25, 1.0]]), formula=np.corrcoef),
        whole("vander", "regular", ROW[:2], call=passing("vander", N=3)),
        whole("vander", "zero", np.zeros(1), call=passing("vander", N=3)),
    ]
    return cases


def _norms() -> list[Case]:
    cases = [whole("norm", "regular", ROW), whole("norm", "zeros", np.zeros(3), choice=0.0)]
    cases.append(
        whole("norm", "zeros, 0-d axis", np.zeros((1, 2)), call=passing("norm", axis=-1), choice=0.0)
    )
    unit = np.array([[0.0, 0.0], [0.6, 0.8]])
    cases += [
        whole(
            "norm",
            "a zero row",
            unit * 5.0,
            call=passing("norm", axis=-1),
            choice=[[0.0, 0.0], [0.6 * W[1], 0.8 * W[1]]],
            orders=(1,),
        ),
        whole("norm", "zero matrix", np.zeros((2, 2)), choice=0.0),
        whole("norm", "ord 1", ROW, call=passing("norm", ord=1)),
        whole("norm", "ord 1, zeros", np.zeros(2), call=passing("norm", ord=1), choice=0.0),
        whole("norm", "ord 3", ROW, call=passing("norm", ord=3)),
        whole("norm", "ord 3, zeros", np.zeros(2), call=passing("norm", ord=3), choice=0.0),
        whole("norm", "ord inf", ROW, call=passing("norm", ord=math.inf)),
        whole(
            "norm",
            "ord inf, tie",
            np.array([2.0, -2.0, 1.0]),
            call=passing("norm", ord=math.inf),
            choice=[0.5 * W[0], -0.5 * W[0], 0.0],
        ),
    ]
    for order in (2, 1, 3):
        name = f"order {order}"
        call = passing("normalize", order=order)
        cases.append(whole("normalize", name, MATRIX, call=call))
        w = weights(2)
        cases.append(
            whole("normalize", f"{name}, a zero row", np.zeros((1, 2)), call=call, first=w / 1e-7, second=0.0)
        )
    cases.append(whole("cdist", "regular", MATRIX, MATRIX[::-1] + 1.0))
    cases.append(whole("cdist", "equal points", np.ones((1, 2)), np.ones((1, 2)), choice=0.0))
    return cases
