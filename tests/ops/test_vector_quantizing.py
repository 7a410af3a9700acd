"""Vector quantization, against its definition with stopped gradients."""

import keras
import numpy as np
import pytest
from support import BACKEND, array, close, compiled, numpy, sizes_made

from multigrad import grad, ops

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4))
CODES = RANDOM.standard_normal((5, 4))
WEIGHTS = RANDOM.standard_normal((2, 3, 4))  # for the quantized vectors
OF_LOSS = RANDOM.standard_normal((2, 3))
DTYPES = ["float16", "bfloat16", "float32", *(["float64"] if BACKEND in ("tensorflow", "torch") else [])]


def closest(x, codes):
    return np.argmin(np.sum((x[..., None, :] - codes) ** 2, axis=-1), axis=-1)


def by_definition(x, codes, commitment=0.25):
    """Return the result of equation 3 of the paper."""
    chosen = ops.take(codes, array(closest(numpy(X), numpy(CODES)), dtype="int32"), axis=0)
    stop = ops.stop_gradient
    to_codes = ops.sum(ops.square(stop(x) - chosen), axis=-1)
    to_x = ops.sum(ops.square(x - stop(chosen)), axis=-1)
    return x + stop(chosen - x), to_codes + commitment * to_x


def objective(quantize, **options):
    """Return a scalar that depends on both differentiable outputs, nonlinearly on the quantized vectors."""

    def total(x, codes):
        quantized, *_, loss = quantize(x, codes, **options)
        return ops.sum(array(WEIGHTS) * quantized**2) + ops.sum(array(OF_LOSS) * loss)

    return total


@pytest.mark.forward
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_values(dtype):
    found = ops.vector_quantize(array(X, dtype=dtype), array(CODES, dtype=dtype))
    exact = "float32" if "16" in dtype else dtype
    dtypes = [keras.backend.standardize_dtype(part.dtype) for part in found]
    assert dtypes == [dtype, "int32", exact]
    x, codes = [numpy(ops.cast(array(v, dtype=dtype), exact)).astype("float64") for v in (X, CODES)]
    wanted = closest(x, codes)
    assert len(set(wanted.flat)) > 1
    assert numpy(found.indices).tolist() == wanted.tolist()
    np.testing.assert_array_equal(numpy(ops.cast(found.quantized, exact)), codes[wanted].astype(exact))
    np.testing.assert_allclose(numpy(found.loss), 1.25 * np.sum((x - codes[wanted]) ** 2, -1), rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("commitment", [0.25, 2, 0.0])
def test_the_gradients(commitment, wrap):
    got, wanted = [
        wrap(grad(objective(quantize, commitment=commitment), argnums=(0, 1)))(array(X), array(CODES))
        for quantize in (ops.vector_quantize, by_definition)
    ]
    close(got, wanted)


@pytest.mark.parametrize("by", [0, 1])
def test_second_derivatives(by):
    """Second derivatives of both gradients. Each term of the loss treats one argument as a constant."""

    def second(quantize):
        slope = grad(objective(quantize), argnums=by)
        return grad(lambda x, codes: ops.sum(ops.sin(slope(x, codes))), argnums=(0, 1))(
            array(X), array(CODES)
        )

    close(second(ops.vector_quantize), second(by_definition))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_each_dtype(dtype):
    def total(x, codes):
        quantized, _, loss = ops.vector_quantize(x, codes)
        return ops.sum(ops.cast(quantized, loss.dtype) * ops.cast(array(WEIGHTS), loss.dtype)) + ops.sum(loss)

    x, codes = array(X, dtype=dtype), array(CODES, dtype=dtype)
    by_x, by_codes = grad(total, argnums=(0, 1))(x, codes)
    assert {keras.backend.standardize_dtype(g.dtype) for g in (by_x, by_codes)} == {dtype}
    away = X - CODES[closest(X, CODES)]
    wanted = np.zeros_like(CODES)
    np.add.at(wanted, closest(X, CODES).ravel(), -2.0 * away.reshape(-1, 4))
    tolerance = {"float16": 1e-2, "bfloat16": 6e-2}.get(dtype, 1e-5)
    close(ops.cast(by_x, "float32"), array(WEIGHTS + 0.5 * away), tolerance)
    close(ops.cast(by_codes, "float32"), array(wanted), tolerance)


@pytest.mark.forward
def test_ties_choose_the_first_vector():
    codes = array([[1.0, 0.0], [3.0, 3.0], [-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    rows = array([[0.0, 0.0], [0.0, 5.0], [-2.0, 0.0], [2.0, 0.0]])
    assert numpy(ops.vector_quantize(rows, codes).indices).tolist() == [0, 1, 2, 0]


@pytest.mark.forward
def test_half_precision_is_computed_in_float32():
    """300**2 overflows float16, and 256 + 1 is not a bfloat16."""
    for dtype, size in (("float16", 300.0), ("bfloat16", 16.0)):
        codes = array([[size, 1.0], [size, 0.0], [-size, 0.0]], dtype=dtype)
        found = ops.vector_quantize(array([[size, 0.25]], dtype=dtype), codes)
        assert numpy(found.indices).tolist() == [1]
        close(found.loss, array([1.25 * 0.0625]))


@pytest.mark.forward
def test_one_vector_and_no_vectors():
    codes = array(CODES)
    one = ops.vector_quantize(codes[3], codes)
    assert (int(one.indices), float(one.loss)) == (3, 0.0)
    none = ops.vector_quantize(ops.zeros((0, 4)), codes)
    assert [tuple(part.shape) for part in none] == [(0, 4), (0,), (0,)]


def test_symbolic_outputs():
    parts = ops.vector_quantize(keras.Input((3, 4)), CODES.astype("float32"))
    assert [part.shape for part in parts] == [(None, 3, 4), (None, 3), (None, 3)]
    assert [part.dtype for part in parts] == ["float32", "int32", "float32"]


def test_no_tensor_of_all_pairs():
    """For 32 vectors, 16 codebook vectors, and 8 elements."""
    found = sizes_made(
        grad(lambda x, codes: ops.sum(ops.vector_quantize(x, codes).loss), argnums=(0, 1)),
        ops.ones((32, 8)),
        ops.ones((16, 8)),
    )
    assert 32 * 16 <= max(found) < 32 * 16 * 8 / 4
