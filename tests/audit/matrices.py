"""The audit's points of linear algebra: solvers, factors, determinants and decompositions."""

from typing import Any

import numpy as np

from audit.cases import MATRIX, RANK_ONE, ROW, SINGULAR, SPREAD, SQUARE, Case, whole


def matrix_cases() -> list[Case]:
    """Return the cases of linear algebra."""
    return [*_linear_algebra(), *_spectra()]


def _linear_algebra() -> list[Case]:
    cases = [whole(op, "regular", SQUARE) for op in ("det", "inv", "slogdet", "qr")]
    for name, a in (("singular", SINGULAR), ("rank 1", RANK_ONE), ("zeros", np.zeros((3, 3)))):
        cases.append(whole("det", name, a))
    cases.append(whole("det", "rank 1, 2 x 2", np.array([[1.0, 2.0], [2.0, 4.0]])))
    cases.append(whole("det", "zeros, 1 x 1", np.zeros((1, 1))))
    cases.append(whole("det", "identity", np.eye(3)))
    cases.append(whole("det", "batch", np.stack([SQUARE, SINGULAR])))
    # The sum of the sign and the logarithm: the sign is constant.
    cases.append(whole("slogdet", "negative", SQUARE[::-1]))
    cases.append(whole("logdet", "regular", SPREAD, call=_of_symmetric("logdet")))
    cases.append(whole("solve", "regular", SQUARE, ROW[:3, None]))
    lower = np.tril(SQUARE)
    cases.append(
        whole(
            "solve_triangular",
            "regular",
            lower,
            ROW[:3, None],
            call=lambda ops, a, b: ops.solve_triangular(a, b, lower=True),
        )
    )
    factor = np.linalg.cholesky(SPREAD)
    cases.append(whole("cholesky", "regular", SPREAD, call=_of_symmetric("cholesky")))
    cases.append(
        whole("cholesky_inverse", "regular", factor, call=lambda ops, a: ops.cholesky_inverse(ops.tril(a)))
    )
    cases.append(whole("cholesky", "identity", np.eye(2), call=_of_symmetric("cholesky")))
    for name, a in (("tall", MATRIX.T), ("wide", MATRIX), ("square", SQUARE)):
        cases.append(whole("pinv", name, a))
    cases.append(whole("lstsq", "tall", MATRIX.T, ROW[:3, None]))
    cases.append(whole("lu_factor", "regular", SQUARE, call=lambda ops, a: ops.lu_factor(a)[0]))
    return cases


def _of_symmetric(op: str) -> Any:
    return lambda ops, a: getattr(ops, op)(_symmetric(ops, a))


def _symmetric(ops: Any, a: Any) -> Any:
    return 0.5 * (a + ops.swapaxes(a, -1, -2))


def _spectra() -> list[Case]:
    """Return the cases of decompositions, as functions that do not depend on the signs of vectors."""

    def root(ops: Any, a: Any) -> Any:
        values, vectors = ops.eigh(_symmetric(ops, a))
        return (vectors * ops.sqrt(values)[..., None, :]) @ ops.swapaxes(vectors, -1, -2)

    def projector(ops: Any, a: Any) -> Any:
        vectors = ops.eigh(_symmetric(ops, a))[1][:, :2]
        return vectors @ ops.transpose(vectors)

    def values(ops: Any, a: Any) -> Any:
        return ops.sum(ops.square(ops.eigh(_symmetric(ops, a))[0]))

    def polar_factor(ops: Any, a: Any) -> Any:
        u, _, vt = ops.svd(a, full_matrices=False)
        return u @ vt

    def singular_values(ops: Any, a: Any) -> Any:
        return ops.svd(a, full_matrices=False)[1]

    def moduli(ops: Any, a: Any) -> Any:
        return ops.sum(ops.square(ops.abs(ops.eig(a)[0])))

    repeated = np.diag([1.0, 1.0, 4.0])
    cases = [
        whole("eigh", f"square root, {name}", a, call=root)
        for name, a in (("distinct", SPREAD), ("repeated", repeated), ("identity", np.eye(3)))
    ]
    for name, a in (("distinct", SPREAD), ("repeated", repeated)):
        cases.append(whole("eigh", f"projector, {name}", a, call=projector))
        cases.append(whole("eigh", f"sum of squares, {name}", a, call=values))
    for name, a in (("distinct", SQUARE), ("repeated", np.diag([2.0, 2.0, 1.0])), ("tall", MATRIX.T)):
        cases.append(whole("svd", f"polar factor, {name}", a, call=polar_factor))
    cases.append(whole("eig", "sum of squares, distinct", SQUARE, call=moduli))
    cases.append(whole("svd", "values, distinct", SQUARE, call=singular_values))
    return cases
