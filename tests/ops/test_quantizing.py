"""Straight-through estimators, learned steps and spikes, against their definitions."""

import keras
import numpy as np
import pytest
from support import BACKEND, array, close, compiled, numpy

from multigrad import grad, ops

X = np.float32([-2.6, -0.5, 0.25, 1.75])
WEIGHTS = np.float32([3.0, -5.0, 7.0, 11.0])
# JAX has no float64, and Keras supports it only partly on NumPy.
DTYPES = ["float16", "bfloat16", "float32", *(["float64"] if BACKEND in ("tensorflow", "torch") else [])]

CASES = {
    "round": (ops.round_straight_through, [-3.0, -0.0, 0.0, 2.0], WEIGHTS),
    "floor": (
        ops.straight_through(lambda x: ops.cast(ops.floor(x), x.dtype)),
        [-3.0, -1.0, 0.0, 1.0],
        WEIGHTS,
    ),
    "sign": (ops.sign_straight_through, [-1.0, -1.0, 1.0, 1.0], [0.0, -5.0, 7.0, 0.0]),
    "sign, no limit": (lambda x: ops.sign_straight_through(x, None), [-1.0, -1.0, 1.0, 1.0], WEIGHTS),
    "clip": (lambda x: ops.clip_straight_through(x, -1.0, 0.125), [-1.0, -0.5, 0.125, 0.125], WEIGHTS),
    "fake quantize": (
        lambda x: ops.fake_quantize(x, 0.5, bits=3),
        [-2.0, -0.5, 0.0, 1.5],  # 0.25 is half a step, which rounds to the even number 0
        [0.0, -5.0, 7.0, 0.0],
    ),
    "unsigned": (lambda x: ops.fake_quantize(x, 0.5, 2, False), [0.0, 0.0, 0.0, 1.5], [0.0, 0.0, 7.0, 0.0]),
    "spike": (ops.spike, [0.0, 0.0, 1.0, 1.0], WEIGHTS / (1.0 + 10.0 * np.abs(X)) ** 2),
    "arctan": (lambda x: ops.spike(x, "arctan"), [0.0, 0.0, 1.0, 1.0], WEIGHTS / (1.0 + (np.pi * X) ** 2)),
}


@pytest.mark.forward
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_value(name, dtype):
    op, wanted, _ = CASES[name]
    got = op(array(X, dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    close(ops.cast(got, "float32"), array(wanted), 1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient(name, dtype, wrap):
    op, _, wanted = CASES[name]
    weights = array(WEIGHTS, dtype=dtype)
    got = wrap(grad(lambda x: ops.sum(op(x) * weights)))(array(X, dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    close(ops.cast(got, "float32"), array(wanted), 2e-2 if "16" in dtype else 1e-5)


@pytest.mark.parametrize("steps", [0.5, [0.5, 0.25]], ids=["one", "per channel"])
def test_the_gradient_of_a_step(steps):
    x, weights = np.float32([[0.3, 0.3], [-0.7, 9.0]]), np.float32([[7.0, 3.0], [-5.0, 11.0]])

    def loss(steps):
        return ops.sum(array(weights) * ops.fake_quantize(array(x), steps, bits=3))

    v, axis = x / np.array(steps), None if steps == 0.5 else 0
    terms = weights * np.where((v > -4) & (v < 3), np.round(v) - v, np.clip(v, -4, 3))
    count = 4 if steps == 0.5 else 2
    close(grad(loss)(array(steps)), array(terms.sum(axis=axis) / np.sqrt(count * 3)))


@pytest.mark.forward
def test_python_numbers_and_more_bits_than_an_integer():
    close(ops.fake_quantize(0.26, 0.1, bits=np.int64(4)), array(0.3))
    close(ops.fake_quantize(array(0.26, -5.0), 0.5, bits=40), array(0.5, -5.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_of_many_elements_in_half_precision(dtype):
    """`n * high` overflows float16, and the step underflows it."""
    x, step = np.full(70000, 0.25), 0.1
    wanted = x.size * (2.0 - 2.5) / np.sqrt(x.size * 127.0)

    def total(step):
        return ops.sum(ops.cast(ops.fake_quantize(array(x, dtype=dtype), step), "float32"))

    close(grad(total)(array(step)), array(wanted), 1e-2)
    tiny = ops.fake_quantize(array([0.0, 1.0], dtype=dtype), array(1e-9), bits=2)
    close(ops.cast(tiny, "float32"), array([0.0, 1e-9]), 1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("surrogate", ["fast_sigmoid", "arctan"])
def test_large_inputs_of_a_spike_in_half_precision(surrogate, dtype):
    """The square of 301 overflows float16, but its inverse does not underflow."""
    wanted = 3e4 / (1 + 300.0) ** 2 if surrogate == "fast_sigmoid" else 3e4 / (1 + (np.pi * 30.0) ** 2)
    got = grad(lambda x: ops.spike(x, surrogate) * array(3e4, dtype=dtype))(array(30.0, dtype=dtype))
    np.testing.assert_allclose(numpy(ops.cast(got, "float32")), wanted, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bounds_of_another_dtype(dtype):
    x, high = array([-3.0, 0.5, 5.0], dtype=dtype), keras.Variable(2.0)
    for ends in ((-1.0, high), (array(-1.0), array(2.0)), (np.float64(-1.0), np.float32(2.0))):
        got = ops.clip_straight_through(x, *ends)
        assert keras.backend.standardize_dtype(got.dtype) == dtype
        close(ops.cast(got, "float32"), array([-1.0, 0.5, 2.0]))


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 without x64")
def test_python_numbers_have_float64_precision():
    one = array(1.0, dtype="float64")
    for got, wanted in (
        (ops.fake_quantize(one, 0.1), 1.0),
        (ops.clip_straight_through(one, 0.0, 0.1), 0.1),
        (ops.safe_divide(0.1, one), 0.1),
        (grad(lambda x: ops.scale_gradient(x, 0.1))(one), 0.1),
        (grad(lambda x: ops.reverse_gradient(x, 0.1))(one), -0.1),
        (grad(lambda x: ops.clip_gradient(x, value=0.1))(one), 0.1),
    ):
        close(got, np.float64(wanted), 1e-15)


@pytest.mark.parametrize("step", [1, True, np.int64(1), np.float32(1.0), 1.0])
def test_a_constant_step(step):
    close(grad(lambda x: ops.sum(3.0 * ops.fake_quantize(x, step)))(array([1.2, 500.0])), array([3.0, 0.0]))


def test_the_second_derivative_of_a_spike_at_zero():
    """The surrogate derivative has its largest value there."""
    for surrogate in ("fast_sigmoid", "arctan"):
        slope = grad(lambda x, surrogate=surrogate: ops.spike(x, surrogate))
        close(grad(slope)(array(0.0)), array(0.0))
