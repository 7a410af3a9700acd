"""The audit's points of ops of whole arrays: reductions, linear algebra, losses, layers and structure."""

import math
from typing import Any

import numpy as np

from multigrad.testing.audit.cases import Case, whole
from multigrad.testing.audit.elementwise import complex_number

ROW = np.array([0.5, -1.0, 2.0, 0.75])
MATRIX = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
SQUARE = np.array([[2.0, 0.5, -1.0], [0.25, 1.5, 0.75], [-0.5, 1.0, 3.0]])
SINGULAR = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [1.0, 0.0, 1.0]])  # rank 2
RANK_ONE = np.outer([1.0, 2.0, -1.0], [1.0, 0.5, 2.0])
SPREAD = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.25], [0.0, 0.25, 4.0]])  # symmetric, distinct eigenvalues
TIES = np.array([1.0, 3.0, 3.0, -2.0])
IMAGE = np.arange(16.0).reshape(1, 4, 4, 1) * 0.25 - 1.5


def _weights(count: int, index: int = 0) -> np.ndarray:
    """Return the weights of the audit's loss."""
    return 1.0 + 0.5 * np.sin(1.0 + 3.0 * index + 2.0 * np.arange(count))


W = _weights(4)


def array_cases() -> list[Case]:
    """Return the cases of ops of whole arrays."""
    cases: list[Case] = []
    for part in (_reductions(), _products_along(), _products(), _norms()):
        cases += part
    for part in (_linear_algebra(), _spectra(), _networks(), _structure()):
        cases += part
    return cases


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
        cases.append(whole(op, "matrix, axis 0", MATRIX, call=_with(op, axis=0)))
    for op in ("std", "nanstd"):
        cases.append(whole(op, "constant", np.full(3, 2.0), choice=0.0))
        cases.append(whole(op, "zeros", np.zeros(3), choice=0.0))
        cases.append(whole(op, "one element", np.array([2.0]), choice=0.0))
        matrix = np.array([[1.0, 1.0], [1.0, 3.0]])
        known = [[0.0, 0.0], [-0.5 * W[1], 0.5 * W[1]]]
        cases.append(whole(op, "a constant row", matrix, call=_with(op, axis=1), choice=known, orders=(1,)))
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
        cases.append(whole(op, "regular", ROW, call=_with(op, q=0.3)))
    for op in ("percentile", "nanpercentile"):
        cases.append(whole(op, "regular", ROW, call=_with(op, q=30.0)))
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


def _with(op: str, **options: Any) -> Any:
    return lambda ops, *args: getattr(ops, op)(*args, **options)


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
    cases += [whole(op, "regular", *vectors) for op in ("inner", "outer", "vdot", "cross", "kron")]
    cases += [whole("add", "broadcast", MATRIX, ROW[:3]), whole("multiply", "broadcast", MATRIX, ROW[:3])]
    cases.append(whole("hypot", "broadcast", np.ones((2, 1)), np.ones(2)))
    cases.append(whole("logaddexp", "broadcast", np.ones((2, 1)), np.ones(2)))
    w = W.reshape(2, 2)
    cases.append(
        whole(
            "maximum",
            "broadcast",
            np.ones((2, 1)),
            np.ones(2),
            choice=[0.5 * w.sum(1, keepdims=True), 0.5 * w.sum(0)],
        )
    )
    cases.append(whole("tensordot", "regular", left, SQUARE, call=_with("tensordot", axes=1)))
    cases.append(
        whole("einsum", "regular", left, SQUARE, call=lambda ops, a, b: ops.einsum("ij,jk->ik", a, b))
    )
    cases.append(whole("correlate", "regular", ROW, ROW[:2]))
    cases.append(whole("vander", "regular", ROW[:2], call=_with("vander", N=3)))
    cases.append(whole("vander", "zero", np.zeros(1), call=_with("vander", N=3)))
    return cases


def _norms() -> list[Case]:
    cases = [whole("norm", "regular", ROW), whole("norm", "zeros", np.zeros(3), choice=0.0)]
    cases.append(whole("norm", "zeros, 0-d axis", np.zeros((1, 2)), call=_with("norm", axis=-1), choice=0.0))
    unit = np.array([[0.0, 0.0], [0.6, 0.8]])
    cases.append(
        whole(
            "norm",
            "a zero row",
            unit * 5.0,
            call=_with("norm", axis=-1),
            choice=[[0.0, 0.0], [0.6 * W[1], 0.8 * W[1]]],
            orders=(1,),
        )
    )
    cases.append(whole("norm", "zero matrix", np.zeros((2, 2)), choice=0.0))
    cases.append(whole("norm", "ord 1", ROW, call=_with("norm", ord=1)))
    cases.append(whole("norm", "ord 1, zeros", np.zeros(2), call=_with("norm", ord=1), choice=0.0))
    cases.append(whole("norm", "ord 3", ROW, call=_with("norm", ord=3)))
    cases.append(whole("norm", "ord 3, zeros", np.zeros(2), call=_with("norm", ord=3), choice=0.0))
    cases.append(whole("norm", "ord inf", ROW, call=_with("norm", ord=math.inf)))
    cases.append(
        whole(
            "norm",
            "ord inf, tie",
            np.array([2.0, -2.0, 1.0]),
            call=_with("norm", ord=math.inf),
            choice=[0.5 * W[0], -0.5 * W[0], 0.0],
        )
    )
    for order in (2, 1, 3):
        name = f"order {order}"
        call = _with("normalize", order=order)
        cases.append(whole("normalize", name, MATRIX, call=call))
        w = _weights(2)
        cases.append(
            whole("normalize", f"{name}, a zero row", np.zeros((1, 2)), call=call, first=w / 1e-7, second=0.0)
        )
    cases.append(whole("cdist", "regular", MATRIX, MATRIX[::-1] + 1.0))
    cases.append(whole("cdist", "equal points", np.ones((1, 2)), np.ones((1, 2)), choice=0.0))
    return cases


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
    cases.append(whole("svd", "values, distinct", SQUARE, call=singular_values))
    return cases


def _networks() -> list[Case]:
    cases = []
    logits = np.array([[2.0, -1.0, 0.5]])
    for op in ("softmax", "log_softmax", "sparsemax"):
        cases += [whole(op, "regular", logits), whole(op, "large", logits * 50.0)]
    cases.append(whole("softmax", "equal", np.zeros((1, 3))))
    cases.append(
        whole(
            "softmax",
            "-inf among others",
            np.array([[-math.inf, 0.0, 0.0]]),
            first=_softmax_slope(),
            orders=(1,),
        )
    )
    cases.append(whole("glu", "regular", ROW))
    cases.append(whole("layer_normalization", "regular", MATRIX))
    w = _weights(3)
    cases.append(
        whole(
            "layer_normalization",
            "constant",
            np.ones((1, 3)),
            first=(w - w.mean()) / math.sqrt(1e-7),
            second=0.0,
        )
    )
    cases.append(whole("rms_normalization", "regular", MATRIX))
    cases.append(
        whole(
            "batch_normalization",
            "regular",
            MATRIX,
            call=lambda ops, x: ops.batch_normalization(x, ops.mean(x, axis=0), ops.var(x, axis=0), axis=-1),
        )
    )
    cases.append(whole("moments", "regular", MATRIX, call=_with("moments", axes=[0])))
    target = np.array([[0.0, 1.0, 0.0]])
    simplex = np.array([[0.2, 0.5, 0.3]])

    def loss(op: str, y: Any, **options: Any) -> Any:
        return lambda ops, x: getattr(ops, op)(ops.convert_to_tensor(y, _dtype(ops, x, y)), x, **options)

    for op in ("binary_crossentropy", "categorical_crossentropy"):
        cases.append(whole(op, "regular", simplex, call=loss(op, target)))
        for name, x in (("regular", logits), ("large", logits * 50.0), ("zeros", np.zeros((1, 3)))):
            cases.append(whole(op, f"logits, {name}", x, call=loss(op, target, from_logits=True)))
    op = "sparse_categorical_crossentropy"
    index = np.array([1], "int32")
    cases.append(whole(op, "regular", simplex, call=loss(op, index)))
    cases.append(whole(op, "logits", logits, call=loss(op, index, from_logits=True)))
    cases.append(whole("psnr", "regular", MATRIX, MATRIX * 0.5, call=lambda ops, a, b: ops.psnr(a, b, 1.0)))
    kernel = np.array([0.5, -1.0, 2.0, 0.25]).reshape(2, 2, 1, 1)
    for op in ("conv", "depthwise_conv", "conv_transpose"):
        cases.append(whole(op, "regular", IMAGE[:, :3, :3], kernel, orders=(1, 2)))
    for op in ("average_pool", "max_pool"):
        cases.append(
            whole(op, "regular", IMAGE, call=lambda ops, x, op=op: getattr(ops, op)(x, 2, strides=2))
        )
    cases.append(
        whole(
            "max_pool",
            "tie",
            np.zeros((1, 2, 2, 1)),
            call=lambda ops, x: ops.max_pool(x, 2, strides=2),
            choice=[W[0], 0.0, 0.0, 0.0],
        )
    )
    return cases


def _softmax_slope() -> np.ndarray:
    w = _weights(3)
    half = (w[1] - w[2]) / 4
    return np.array([[0.0, half, -half]])


def _dtype(ops: Any, x: Any, y: Any) -> Any:
    return y.dtype.name if y.dtype.kind == "i" else x.dtype


def _structure() -> list[Case]:
    """Return the cases of linear ops, which move elements."""
    x = MATRIX
    calls = {
        "reshape": lambda ops, x: ops.reshape(x, (3, 2)),
        "transpose": lambda ops, x: ops.transpose(x),
        "concatenate": lambda ops, x: ops.concatenate([x, 2.0 * x]),
        "stack": lambda ops, x: ops.stack([x, 2.0 * x]),
        "split": lambda ops, x: ops.split(x, 3, axis=1),
        "take": lambda ops, x: ops.take(x, [0, 2, 2], axis=1),
        "take_along_axis": lambda ops, x: ops.take_along_axis(x, ops.array([[0], [2]]), axis=1),
        "pad": lambda ops, x: ops.pad(x, ((1, 1), (0, 1))),
        "tile": lambda ops, x: ops.tile(x, (2, 1)),
        "repeat": lambda ops, x: ops.repeat(x, 2, axis=0),
        "roll": lambda ops, x: ops.roll(x, 1),
        "flip": lambda ops, x: ops.flip(x),
        "broadcast_to": lambda ops, x: ops.broadcast_to(x, (2, 2, 3)),
        "where": lambda ops, x: ops.where(x > 0.0, x, 2.0 * x),
        "slice": lambda ops, x: ops.slice(x, (0, 1), (2, 2)),
        "slice_update": lambda ops, x: ops.slice_update(x, (0, 1), 2.0 * x[:, :2]),
        "scatter_update": lambda ops, x: ops.scatter_update(x, ops.array([[0, 0], [1, 2]]), 3.0 * x[0, :2]),
        "scatter": lambda ops, x: ops.scatter(ops.array([[0], [1], [0]]), x[0], (2,)),
        "segment_sum": lambda ops, x: ops.segment_sum(x[0], ops.array([0, 1, 1]), 2),
        "segment_max": lambda ops, x: ops.segment_max(x[0], ops.array([0, 1, 1]), 2),
        "diag": lambda ops, x: ops.diag(x[0]),
        "diagonal": lambda ops, x: ops.diagonal(x),
        "trace": lambda ops, x: ops.trace(x),
        "tril": lambda ops, x: ops.tril(x),
        "triu": lambda ops, x: ops.triu(x),
        "squeeze": lambda ops, x: ops.squeeze(x[:, None]),
        "cast": lambda ops, x: ops.cast(x, x.dtype),
    }
    # Keras (3.15) computes the values of these in float32 on PyTorch, which is too coarse for differences.
    known = {
        "segment_sum": [[W[0], W[1], W[1]], [0.0, 0.0, 0.0]],
        "segment_max": [[W[0], 0.0, W[1]], [0.0, 0.0, 0.0]],
    }
    cases = [whole(op, "regular", x, call=call, first=known.get(op)) for op, call in calls.items()]
    cases.append(whole("fft", "regular", x, x, call=lambda ops, a, b: ops.fft((a, b))))
    cases.append(whole("rfft", "regular", ROW))
    cases.append(
        whole(
            "view_as_real",
            "regular",
            x,
            x[::-1],
            call=lambda ops, a, b: ops.view_as_real(complex_number(ops, a, b)),
        )
    )
    return cases
