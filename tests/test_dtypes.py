"""Empty and scalar tensors, every floating dtype, and complex numbers."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, numpy

from multigrad import grad, op_custom_gradient


@op_custom_gradient
def triple(x):
    return x * 2, lambda u: u * 7


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (1, 1, 1)])
def test_shapes(shape):
    got = grad(lambda x: ops.sum(triple(x)))(np.ones(shape, "float32"))
    assert got.shape == shape
    close(got, array(7 * np.ones(shape)))


FLOATS = ["float16", "bfloat16", "float32"] + ([] if BACKEND == "jax" else ["float64"])


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_dtypes(dtype):
    got = grad(lambda x: ops.sum(triple(x)))(array([1.0, 2.0], dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    close(ops.cast(got, "float32"), array(7.0, 7.0))


def test_a_complex_gradient_is_the_same_everywhere():
    """The gradient of |z|^2 times (a + ib) z is 2 (a - ib) (a + ib) z, as in TensorFlow and PyTorch."""
    factor = 2.0 + 1.0j

    @op_custom_gradient
    def rotate(z):
        return z * factor, lambda u: u * np.conj(factor)

    def loss(z):
        w = rotate(z)
        return ops.sum(ops.real(w) ** 2 + ops.imag(w) ** 2)

    z = np.array([1.0 + 2.0j, -3.0j], "complex64")
    close(grad(loss)(z), array(2 * abs(factor) ** 2 * z, dtype="complex64"))


def test_the_upstream_of_a_complex_output():
    seen = []

    @op_custom_gradient
    def same(z):
        def rule(u):
            seen.append(numpy(u))
            return u * 3.0j

        return z * 1.0, rule

    got = grad(lambda z: ops.sum(ops.real(same(z)) * 2.0 + ops.imag(same(z)) * 5.0))(1.0 + 1.0j)
    np.testing.assert_allclose(sum(seen), 2.0 + 5.0j)
    close(got, array(3.0j * (2.0 + 5.0j), dtype="complex64"))


def test_a_real_argument_takes_the_real_part():
    @op_custom_gradient
    def op(x):
        return x * 2.0, lambda u: ops.cast(u, "complex64") * (7.0 + 1.0j)

    got = grad(op)(1.0)
    assert keras.backend.standardize_dtype(got.dtype) == "float32"
    close(got, array(7.0))
