"""Stable functions at zero and near the limits of each dtype, against NumPy with higher precision."""

import keras
import ml_dtypes
import numpy as np
import pytest
from support import BACKEND, DIFFERENTIATES, array, close, compiled, compiled_by_xla, numpy

from multigrad import grad, ops, value_and_grad
from multigrad.testing import check_gradients

# JAX has no float64, and Keras supports it only partly on NumPy.
DTYPES = ["float16", "bfloat16", "float32", *(["float64"] if BACKEND in ("tensorflow", "torch") else [])]
WRAPS = {"eager": lambda f: f, "compiled": compiled}
NAN, INF = float("nan"), float("inf")


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def logcosh(x):
    size = np.abs(x)
    near = np.log1p(2 * np.sinh(np.minimum(size, 1) / 2) ** 2)
    return np.where(size < 1, near, size - np.log(np.longdouble(2)) + np.log1p(np.exp(-2 * size)))


def sech2(x):
    e = np.exp(-2 * np.abs(x))
    return 4 * e / (1 + e) ** 2


# The op, followed by its value and its first two derivatives in NumPy.
ELEMENTWISE = {
    "log1pexp": (
        ops.log1pexp, lambda x: np.logaddexp(x, np.longdouble(0)), sigmoid, lambda x: sigmoid(x) * sigmoid(-x)
    ),
    "logcosh": (ops.logcosh, logcosh, np.tanh, sech2),
    "safe_sqrt": (ops.safe_sqrt, np.sqrt, lambda x: 0.5 / np.sqrt(x), lambda x: -0.25 / x / np.sqrt(x)),
    "safe_log": (ops.safe_log, np.log, lambda x: 1 / x, lambda x: -1 / x / x),
}  # fmt: skip


def total(op):
    """Return a function of one tensor whose gradient is the elementwise derivative of the op."""
    return lambda x: ops.sum(ops.cast(op(x), "float64" if x.dtype == "float64" else "float32"))


def exactly(tensor):
    """Return the value of a tensor in NumPy's longest float, on most machines longer than float64."""
    half = keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16")
    return numpy(ops.cast(tensor, "float32") if half else tensor).astype("longdouble")


def numbers(dtype, both_signs):
    """Return numbers over the whole range of the dtype, from the smallest to the largest normal number."""
    ends = ml_dtypes.finfo(dtype)
    low, high = float(ends.smallest_normal), float(ends.max)
    random = np.random.default_rng(0)
    found = np.exp(random.uniform(np.log(low), np.log(high), 4000))
    found = np.concatenate([found, random.uniform(0.0, 90.0, 4000), [low, high], [1e-30, 1.0, 1e30]])
    found = found[(found >= low) & (found <= high)]
    return np.concatenate([found, -found] if both_signs else [found]).astype(dtype)


def largest_error(got, wanted, dtype):
    """Return the largest error in units in the last place.

    The outermost numbers are excluded, because some backends flush intermediate results that are subnormal.
    """
    ends = ml_dtypes.finfo(dtype)
    counted = (abs(wanted) >= 4 * float(ends.smallest_normal)) & (abs(wanted) <= float(ends.max) / 16)
    assert counted.sum() > 100
    unit = float(ends.eps) * 2.0 ** np.floor(np.log2(abs(wanted[counted])))
    return float((abs(got[counted] - wanted[counted]) / unit).max())


@pytest.mark.forward
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_values_over_the_whole_range(name, dtype):
    op, value, _, _ = ELEMENTWISE[name]
    x = numbers(dtype, both_signs=not name.startswith("safe"))
    got = op(array(x.astype("float64"), dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    wanted = value(x.astype("longdouble"))
    if BACKEND == "openvino":  # Keras (3.15) computes log1p as log(1 + x) there, and expm1 as exp(x) - 1
        np.testing.assert_allclose(exactly(got), wanted, rtol=1e-2 if "16" in dtype else 1e-6, atol=1e-6)
        return
    assert largest_error(exactly(got), wanted, dtype) < (0.51 if "16" in dtype else 12.0)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_derivatives_over_the_whole_range(name, dtype, wrap):
    op, _, first, second = ELEMENTWISE[name]
    x = numbers(dtype, both_signs=not name.startswith("safe"))
    slope = grad(total(op))
    for function, wanted in ((slope, first), (grad(total(slope)), second)):
        got = wrap(function)(array(x.astype("float64"), dtype=dtype))
        assert keras.backend.standardize_dtype(got.dtype) == dtype
        error = largest_error(exactly(got), wanted(x.astype("longdouble")), dtype)
        assert error < (0.51 if "16" in dtype else 10.0)


# For each x: the value, the derivative and, if given, the second derivative.
ENDS = {
    "log1pexp": [
        (0.0, np.log(2.0), 0.5, 0.25), (INF, INF, 1.0, 0.0), (-INF, 0.0, 0.0, 0.0), (NAN, NAN, NAN, NAN)
    ],
    "logcosh": [
        (0.0, 0.0, 0.0, 1.0), (INF, INF, 1.0, 0.0), (-INF, INF, -1.0, 0.0), (NAN, NAN, NAN, NAN)
    ],
    "safe_sqrt": [
        (0.0, 0.0, 0.0, 0.0), (-0.0, 0.0, 0.0, 0.0), (INF, INF, 0.0, 0.0), (-1.0, NAN, NAN, NAN),
        (-INF, NAN, NAN, NAN), (NAN, NAN, NAN, NAN),
    ],
    "safe_log": [
        (0.0, None, 0.0, 0.0), (-0.0, None, 0.0, 0.0), (INF, INF, 0.0, 0.0), (-1.0, NAN, NAN, None),
        (-INF, NAN, NAN, None), (NAN, NAN, NAN, NAN),
    ],
}  # fmt: skip


@pytest.mark.forward
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, of -1
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ENDS)
def test_special_values(name, dtype):
    op = ELEMENTWISE[name][0]
    x = array([row[0] for row in ENDS[name]], dtype=dtype)
    functions = [op, grad(total(op)), grad(total(grad(total(op))))] if DIFFERENTIATES else [op]
    for place, function in enumerate(functions, 1):
        got = exactly(function(x))
        for of, row in zip(got, ENDS[name], strict=True):
            if row[place] is not None:
                np.testing.assert_allclose(of.astype("float64"), row[place], rtol=1e-2, err_msg=str(row))


@pytest.mark.forward
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logarithm_of_zero(dtype):
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    x = array(0.0, smallest, 2 * smallest, float(ml_dtypes.finfo(dtype).smallest_normal), dtype=dtype)
    got = exactly(ops.safe_log(x)).astype("float64")
    np.testing.assert_allclose(got[0], np.log(smallest), rtol=5e-3)
    assert np.all(np.diff(got) >= 0.0)
    assert got[3] > got[0] + 4.0
    assert exactly(x[0] * ops.safe_log(x[0])) == 0.0


def test_subnormal_numbers():
    """Some backends flush subnormal numbers, but in float32 those of half precision are normal."""
    kept = ["float16", *(["bfloat16", "float32", "float64"] if BACKEND == "torch" else [])]
    for dtype in kept:
        x = array(np.float64([7.0, 100.0]) * float(ml_dtypes.finfo(dtype).smallest_subnormal), dtype=dtype)
        x64 = exactly(x)
        close(exactly(ops.safe_log(x)).astype("float64"), np.log(x64).astype("float64"), 5e-3)
        close(exactly(ops.safe_sqrt(x)) / np.sqrt(x64), np.ones(2), 5e-3)
        slopes = exactly(grad(total(ops.safe_sqrt))(x)) * np.sqrt(x64)
        np.testing.assert_allclose(slopes.astype("float64"), [0.5, 0.5], rtol=5e-3)
        unit = exactly(grad(total(ops.safe_norm))(x))
        np.testing.assert_allclose(unit.astype("float64"), x64 / np.hypot(*x64), rtol=5e-3)


RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((2, 3, 4))


@pytest.mark.parametrize("axis", [None, 1, (0, -1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_differences_of_a_norm(axis, keepdims):
    done = check_gradients(lambda x: ops.safe_norm(x, axis, keepdims), A, order=2, compiled=False)
    assert done.precision == "float64"


@pytest.mark.forward
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [None, 0, (1, 2), (-1, 0)])
def test_the_norm(axis, dtype):
    for keepdims in (False, True):
        got = ops.safe_norm(array(A, dtype=dtype), axis=axis, keepdims=keepdims)
        assert keras.backend.standardize_dtype(got.dtype) == dtype
        wanted = np.sqrt(np.sum(A**2, axis=axis, keepdims=keepdims))
        assert tuple(got.shape) == wanted.shape
        np.testing.assert_allclose(
            exactly(got).astype("float64"), wanted, rtol=1e-2 if "16" in dtype else 1e-6
        )


def sizes(dtype):
    """Return the largest scale at which 5 is finite, the smallest at which 3 is normal, 1e30 and 1e-30."""
    ends = ml_dtypes.finfo(dtype)
    found = [float(ends.max) / 5.1, float(ends.smallest_normal), 1e30, 1e-30, 1.0]
    return [size for size in found if found[1] <= size <= found[0]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_any_size(dtype):
    for size in sizes(dtype):
        value, slope = value_and_grad(ops.safe_norm)(array(3.0 * size, -4.0 * size, dtype=dtype))
        rtol = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 5e-7, "float64": 1e-15}[dtype]
        np.testing.assert_allclose(float(exactly(value)) / size, 5.0, rtol=rtol)
        np.testing.assert_allclose(exactly(slope).astype("float64"), [0.6, -0.8], rtol=rtol)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_norm_that_overflows(dtype, wrap):
    largest = float(ml_dtypes.finfo(dtype).max)
    value, slope = wrap(value_and_grad(ops.safe_norm))(array(largest, -largest, dtype=dtype))
    assert float(exactly(value)) == INF
    np.testing.assert_allclose(exactly(slope).astype("float64"), [0.5**0.5, -(0.5**0.5)], rtol=1e-2)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_norms_at_singular_points(wrap):
    rows = array([[0.0, 0.0], [INF, 1.0], [NAN, 1.0], [3.0, 4.0]])
    norms = numpy(wrap(lambda x: ops.safe_norm(x, -1))(rows))
    np.testing.assert_array_equal(norms, [0.0, INF, NAN, 5.0])
    slope = grad(lambda x: ops.sum(ops.safe_norm(x, -1)))
    wanted = np.float32([[0.0, 0.0], [NAN, 0.0], [NAN, NAN], [0.6, 0.8]])
    np.testing.assert_allclose(numpy(wrap(slope)(rows)), wanted, rtol=1e-6)
    second = numpy(wrap(grad(lambda x: ops.sum(slope(x))))(rows))
    np.testing.assert_array_equal(second[0], [0.0, 0.0])
    np.testing.assert_allclose(second[3], [(16 - 12) / 125, (9 - 12) / 125], rtol=1e-5)


@pytest.mark.forward
def test_the_norm_of_an_empty_tensor():
    assert numpy(ops.safe_norm(ops.zeros((2, 0)), -1)).tolist() == [0.0, 0.0]
    assert numpy(ops.safe_norm(ops.zeros((0,)))) == 0.0


# x, y, the quotient, and its derivatives with respect to both.
QUOTIENTS = [
    (3.0, 0.0, 0.0, 0.0, 0.0), (-3.0, -0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0),
    (INF, 0.0, 0.0, 0.0, 0.0), (NAN, 0.0, NAN, 0.0, 0.0), (NAN, 2.0, NAN, 0.5, NAN),
    (1.0, NAN, NAN, NAN, NAN), (1.0, INF, 0.0, 0.0, 0.0), (1e30, 1e30, 1.0, 1e-30, -1e-30),
    (1e-30, 1e-30, 1.0, 1e30, -1e30), (1e30, 1e20, 1e10, 1e-20, -1e-10),
    (1e-30, 1e-20, 1e-10, 1e20, -1e10), (1e-20, 1e-25, 1e5, 1e25, -1e30),
    (1e38, 1e25, 1e13, 1e-25, -1e-12), (0.0, 1e-30, 0.0, 1e30, 0.0), (6.0, -2.0, -3.0, -0.5, -1.5),
]  # fmt: skip


@pytest.mark.forward
def test_quotients():
    x, y, wanted, by_x, by_y = np.float32(QUOTIENTS).T
    np.testing.assert_allclose(numpy(ops.safe_divide(array(x), array(y))), wanted, rtol=1e-6)
    if DIFFERENTIATES:
        slopes = grad(lambda x, y: ops.sum(ops.safe_divide(x, y)), argnums=(0, 1))
        second = grad(lambda x, y: ops.sum(slopes(x, y)[1]), argnums=(0, 1))
        close(second(array(3.0, 3.0), array(2.0, 0.0)), (array(-0.25, 0.0), array(0.75, 0.0)))
        got = slopes(array(x), array(y))
        np.testing.assert_allclose(numpy(got[0]), by_x, rtol=1e-6)
        np.testing.assert_allclose(numpy(got[1]), by_y, rtol=1e-6)


def test_quotients_in_compiled_code():
    """XLA replaces two divisions by one number by a division by its square, which overflows or underflows."""
    x, y, _, _, by_y = np.float32([row for row in QUOTIENTS if np.isfinite(row).all()]).T
    slopes = compiled_by_xla(grad(lambda x, y: ops.sum(ops.safe_divide(x, y)), argnums=1))
    np.testing.assert_allclose(numpy(slopes(array(x), array(y))), by_y, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_quotients(dtype, wrap):
    x, y = array([[1.0], [2.0]], dtype=dtype), array([4.0, 0.0, 0.5], dtype=dtype)
    got = wrap(grad(lambda x, y: ops.sum(ops.safe_divide(x, y)), argnums=(0, 1)))(x, y)
    assert [keras.backend.standardize_dtype(g.dtype) for g in got] == [dtype, dtype]
    close([ops.cast(g, "float32") for g in got], [array([[2.25], [2.25]]), array(-3 / 16, 0.0, -12.0)], 1e-5)


@pytest.mark.parametrize("name", ["safe_sqrt", "safe_log", "safe_norm", "safe_divide"])
def test_nan_in_an_upstream_gradient_is_not_hidden(name):
    """If the derivative is defined as zero, NaN and Inf in the upstream gradient still propagate."""
    op = (lambda x: ops.safe_divide(x, x)) if name == "safe_divide" else getattr(ops, name)
    if name == "safe_norm":
        op = lambda x: ops.safe_norm(x[:, None], -1)  # noqa: E731
    weights = array(2.0, NAN, INF)
    got = numpy(grad(lambda x: ops.sum(op(x) * weights))(array(0.0, 0.0, 0.0)))
    assert got[0] == 0.0
    assert np.isnan(got[1:]).all()


@pytest.mark.forward
def test_integers_give_the_float_dtype_of_keras():
    whole = array([3, 4], dtype="int32")
    assert float(ops.safe_norm(whole)) == 5.0
    for got in (
        ops.safe_sqrt(whole),
        ops.log1pexp(whole),
        ops.safe_divide(whole, 2),
        ops.safe_divide(1, whole),
    ):
        assert keras.backend.standardize_dtype(got.dtype) == "float32"
    assert float(ops.safe_sqrt(4)) == 2.0
    assert float(ops.safe_norm([3.0, 4.0])) == 5.0
    half = ops.safe_divide(array(3.0, dtype="bfloat16"), 2.0)
    assert keras.backend.standardize_dtype(half.dtype) == "bfloat16"


def test_gradients_with_an_integer_argument():
    x, whole = array(3.0, 6.0), array([2, 0], dtype="int32")
    close(grad(lambda x: ops.sum(ops.safe_divide(x, whole)))(x), array(0.5, 0.0))
    close(grad(lambda x: ops.sum(ops.safe_divide(whole, x)))(x), array(-2.0 / 9.0, 0.0))
    close(grad(lambda x: ops.sum(ops.safe_divide(x, 2)))(x), array(0.5, 0.5))


@pytest.mark.forward
@pytest.mark.parametrize("name", ["log1pexp", "logcosh", "safe_sqrt", "safe_log", "safe_norm", "safe_divide"])
def test_complex_numbers_raise(name):
    if BACKEND == "openvino":
        pytest.skip("OpenVINO has no complex numbers")
    args = (2.0, 1j) if name == "safe_divide" else (1j,)
    argument = "y" if name == "safe_divide" else "x"
    with pytest.raises(TypeError, match=rf"{name}: {argument} cannot be used(.|\n)*a real dtype(.|\n)*fix"):
        getattr(ops, name)(*args)
