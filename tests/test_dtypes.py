"""Empty and scalar tensors, every floating dtype, and complex numbers."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close

import multigrad
from multigrad import grad, jacobian, op_custom_gradient, value_and_grad


@op_custom_gradient
def triple(x):
    return x * 2, lambda u: u * 7


FLOATS = ["float16", "bfloat16", "float32"] + ([] if BACKEND == "jax" else ["float64"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3), (1, 1, 1)])
def test_shapes_and_dtypes(shape, dtype):
    got = grad(lambda x: ops.sum(triple(x)))(array(np.ones(shape), dtype=dtype))
    assert (tuple(got.shape), keras.backend.standardize_dtype(got.dtype)) == (shape, dtype)
    close(ops.cast(got, "float32"), array(7 * np.ones(shape)))


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


def test_a_real_argument_takes_the_real_part():
    @op_custom_gradient
    def op(x):
        return x * 2.0, lambda u: ops.cast(u, "complex64") * (7.0 + 1.0j)

    got = grad(op)(1.0)
    assert keras.backend.standardize_dtype(got.dtype) == "float32"
    close(got, array(7.0))


# ------------------------------------------------------------------------ Python numbers and NumPy arrays


def jit(function):
    return multigrad.jit(function, **({"backend": "eager"} if BACKEND == "torch" else {}))


def spied():
    """Return an op of (x, y, rate), and a list of what its function gets: a dtype, or None for a number."""
    seen = []

    @op_custom_gradient
    def product(x, y, rate=0.5):
        seen.append([keras.backend.standardize_dtype(v.dtype) if ops.is_tensor(v) else None for v in (x, y)])
        assert type(rate) is float
        return x * y * rate, lambda u: (u * 7.0, None if type(y) is int else u * 5.0, None)

    return product, seen


F = "float32"
CALLS = {
    "floats": (lambda f: f(2.0, 3.0), [F, F]),
    "an option by name": (lambda f: f(2.0, 3.0, rate=0.1), [F, F]),
    "an argument by name": (lambda f: f(2.0, y=3.0), [F, None]),
    "an integer": (lambda f: f(2.0, 3), [F, None]),
    "a tensor": (lambda f: f(array(2.0), 3.0), [F, None]),
    "a number of NumPy": (lambda f: f(np.float32(2.0), 3.0), [F, None]),
    "an array": (lambda f: f(2.0, np.array(3.0, F)), [None, F]),
    "a variable": (lambda f: f(keras.Variable(2.0), 3.0), [F, None]),
    "an array beside a tensor": (lambda f: f(array(2.0), np.array(3.0, F)), [F, F]),
    "complex numbers": (lambda f: f(2.0j, 3.0j), ["complex64", "complex64"]),
}


@pytest.mark.parametrize(("call", "wanted"), CALLS.values(), ids=CALLS)
def test_which_numbers_are_tensors(call, wanted):
    op, seen = spied()
    call(op)
    assert seen == [wanted]


@pytest.mark.parametrize("name", [name for name in CALLS if "complex" not in name])
def test_a_gradient_runs_the_function_on_the_same(name):
    call, wanted = CALLS[name]
    op, seen = spied()
    close(call(grad(op)), array(7.0))
    assert seen == [[F, wanted[1]]]  # the first argument is a tensor in any case
    seen.clear()
    call(lambda *args, **kwargs: jacobian(op)(*args, **kwargs))
    assert seen == [[F, wanted[1]]]


def test_numbers_have_keras_floatx():
    op, seen = spied()
    keras.config.set_floatx("float16")
    try:
        got = grad(op)(2.0, 3.0)
        op(2.0, 3.0)
    finally:
        keras.config.set_floatx("float32")
    assert seen == [["float16", "float16"]] * 2
    assert keras.backend.standardize_dtype(got.dtype) == "float16"


def test_floats_do_not_hide_a_missing_gradient():
    product = op_custom_gradient(lambda x, y: (x * y, lambda u: u * y))
    for transform in (grad, jacobian):
        with pytest.raises(TypeError, match="wrong number of gradients"):
            transform(product)(2.0, 3.0)


def test_a_float_beside_an_object_is_a_constant():
    class Layer(keras.layers.Layer):
        def build(self):
            self.scale = self.add_weight(shape=(), initializer="ones")

        @op_custom_gradient
        def penalty(self, rate):
            factor = 7.0 if rate > 0 else 5.0  # fails for a traced tensor
            return self.scale**2 * rate, lambda u, variables: (None, [u * factor])

    layer = Layer()
    layer.build()
    step = jit(lambda: value_and_grad(lambda: layer.penalty(0.1), variables=[layer.scale])())
    value, gradients = step()
    close((value, gradients), (array(0.1), [array(7.0)]))


def test_arrays_beside_a_tensor_are_tensors_on_every_backend():
    def loss(x, tree, *, z):
        assert ops.is_tensor(tree["a"])
        assert ops.is_tensor(z)
        return ops.sum(tree["a"] * x * z)

    ones = np.ones(3, "float32")
    args = array(1.0, 2.0, 3.0), {"a": ones, "n": [1, "text", None, np.array(["text"])]}
    for transformed in (grad(loss), jacobian(loss), grad(jit(lambda x, y: loss(x, {"a": y}, z=y)))):
        is_jit = transformed.__name__ != "loss"
        got = transformed(args[0], ones) if is_jit else transformed(*args, z=ones)
        close(got, array(1.0, 1.0, 1.0))
