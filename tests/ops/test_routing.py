"""Ops that return their input and change its gradient, against their definitions."""

import re
import warnings

import keras
import numpy as np
import pytest
from support import BACKEND, array, close, compiled, compiled_by_xla, numpy

from multigrad import grad, jit, jvp, layers, ops, vmap

X = np.float32([1.0, -2.0, 3.0])
WEIGHTS = np.float32([3.0, 0.0, -4.0])  # the upstream gradient, with norm 5

DTYPES = ["float16", "bfloat16", "float32", *(["float64"] if BACKEND != "jax" else [])]  # JAX has no float64

CASES = {
    "scale": (lambda x: ops.scale_gradient(x, 0.5), 0.5 * WEIGHTS),
    "scale by elements": (lambda x: ops.scale_gradient(x, array(1.0, 2.0, 3.0)), [3.0, 0.0, -12.0]),
    "reverse": (ops.reverse_gradient, -WEIGHTS),
    "reverse, scaled": (lambda x: ops.reverse_gradient(x, 7.0), -7.0 * WEIGHTS),
    "stop": (lambda x: ops.stop_gradient_if(True, x), [0.0, 0.0, 0.0]),
    "do not stop": (lambda x: ops.stop_gradient_if(False, x), WEIGHTS),
    "stop some": (lambda x: ops.stop_gradient_if(x > 0.0, x), [0.0, 0.0, 0.0]),
    "stop others": (lambda x: ops.stop_gradient_if(x > 2.0, x), [3.0, 0.0, 0.0]),
    "clip by value": (lambda x: ops.clip_gradient(x, value=2.0), [2.0, 0.0, -2.0]),
    "clip by norm": (lambda x: ops.clip_gradient(x, norm=0.5), 0.1 * WEIGHTS),
    "within the norm": (lambda x: ops.clip_gradient(x, norm=5.5), WEIGHTS),
    "print": (ops.print_gradient, WEIGHTS),
}


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient(name, dtype, wrap):
    op, wanted = CASES[name]
    weights = array(WEIGHTS, dtype=dtype)
    got = wrap(grad(lambda x: ops.sum(op(x) * weights)))(array(X, dtype=dtype))
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    close(ops.cast(got, "float32"), array(wanted), 1e-2 if "16" in dtype else 1e-5)


@pytest.mark.parametrize("axis", [None, -1])
def test_the_derivative_of_clipping_a_zero_gradient(axis):
    """There, clipping is the identity."""

    def loss(x):
        slopes = grad(lambda x: ops.sum(ops.square(ops.clip_gradient(x, norm=7.0, axis=axis))))(x)
        return ops.sum(slopes * array([[1.0, 2.0], [1.0, 2.0]]))

    rows = [[0.0, 0.0], [0.1, 0.2]] if axis else [[0.0, 0.0], [0.0, 0.0]]
    close(grad(loss)(array(rows)), array([[2.0, 4.0], [2.0, 4.0]]))


def test_norms_that_overflow_in_compiled_code():
    """A single division by the product of all factors would return zeros."""
    weights = np.float64([[2.25e38, 3e38], [0.0, 3.75e37]])
    slopes = compiled_by_xla(grad(lambda x: ops.sum(ops.clip_gradient(x, norm=1.0) * array(weights))))
    close(slopes(array(np.zeros((2, 2)))), array(weights / np.linalg.norm(weights)))


def test_stopped_gradients_hide_nan():
    mask = array([True, False], dtype="bool")
    got = grad(lambda x: ops.sum(ops.stop_gradient_if(mask, x) * array(np.nan, 7.0)))(array(1.0, 2.0))
    close(got, array(0.0, 7.0))


def test_the_printed_line(capsys):
    grad(lambda x: ops.sum(ops.print_gradient(x, "here") * array(WEIGHTS)))(array(X))
    assert capsys.readouterr().out == "here: shape (3,), mean -0.333333, largest 4\n"


def jitted(function):
    return jit(function, **({"backend": "aot_eager"} if BACKEND == "torch" else {}))


@pytest.mark.parametrize(
    ("slope", "wanted"),
    [
        (lambda loss: jitted(grad(loss)), [3.0, 12.0]),
        (lambda loss: grad(jitted(loss)), [3.0, 12.0]),
        (lambda loss: jitted(grad(lambda x: ops.sum(grad(loss)(x)))), [6.0, -12.0]),
        (lambda loss: lambda x: vmap(grad(loss))(x[None])[0], [3.0, 12.0]),
    ],
    ids=["jit of grad", "grad of jit", "second derivative", "vmap"],
)
def test_the_printed_line_of_compiled_code(slope, wanted, capsys):
    result = slope(lambda x: ops.sum(ops.print_gradient(x, "here") ** 3))(array(1.0, -2.0))
    assert numpy(result).tolist() == wanted
    if BACKEND == "jax":
        import jax

        jax.effects_barrier()
    assert re.search(r"here: shape \((1, 2|2,)\), mean 7\.5, largest 12\n", capsys.readouterr().out)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the compiler of TensorFlow that cannot call Python")
def test_xla_cannot_print():
    with pytest.raises(Exception, match="callback_cannot_run_with_jit_compile"):
        compiled_by_xla(grad(lambda x: 3.0 * ops.print_gradient(x)))(array(1.0))


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_clipping_gradients_of_any_size(wrap):
    def slope(upstream):
        return wrap(grad(lambda x: ops.sum(ops.clip_gradient(x, norm=1.0) * array(upstream))))

    close(slope([1e38, 3e38])(array([1.0, 2.0])), array(np.float64([1.0, 3.0]) / np.sqrt(10.0)))
    close(slope([3e-30, 4e-30])(array([1.0, 2.0])), array([3e-30, 4e-30]), 1e-32)
    close(slope([0.0, 0.0])(array([1.0, 2.0])), array([0.0, 0.0]))
    for size in (1e-30, 1e30):
        loss = lambda x, s=size: ops.sum(ops.clip_gradient(x, norm=5e-31) * array([3.0 * s, 4.0 * s]))  # noqa: E731
        np.testing.assert_allclose(numpy(wrap(grad(loss))(array(1.0, 1.0))) * 1e31, [3.0, 4.0], rtol=1e-5)
    assert tuple(slope(np.zeros(0))(array(np.zeros(0))).shape) == (0,)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_norm_of_many_elements_in_half_precision(dtype):
    """The sum of the squares overflows float16."""
    x = array(np.ones(70000), dtype=dtype)
    got = grad(lambda x: ops.sum(ops.cast(ops.clip_gradient(x, norm=1.0), "float32")))(x)
    np.testing.assert_allclose(numpy(ops.cast(got, "float32")), 70000**-0.5, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", [ops.scale_gradient, ops.reverse_gradient], ids=["scale", "reverse"])
def test_a_small_factor_in_half_precision(op, dtype):
    """The factor underflows float16, and the upstream gradient compensates for it."""
    loss = grad(lambda x: ops.sum(op(x, 1.5e-8) * array(32768.0, dtype=dtype)))
    found = abs(numpy(ops.cast(loss(array(2.0, dtype=dtype)), "float32")))
    np.testing.assert_allclose(found, 1.5e-8 * 32768.0, rtol=1e-2)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_clipping_warns_once_where_the_loss_is_scaled(wrap):
    clip = wrap(lambda x: ops.clip_gradient(x, value=1.0))
    before = keras.config.dtype_policy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            clip(array(1.0))
            assert not caught
            keras.config.set_dtype_policy("mixed_float16")
            for _ in range(2):
                layers.GradientClip(norm=1.0)(array(1.0))
                clip(array(1.0, 2.0))
        finally:
            keras.config.set_dtype_policy(before)
    (warning,) = caught
    assert "mixed-precision#loss-scaling" in str(warning.message)


@pytest.mark.parametrize("bound", ["value", "norm"])
def test_clipping_raises_in_forward_mode(bound):
    """The derivative of the gradient in reverse mode needs no transpose."""

    def clipped(x):
        return 3.0 * ops.clip_gradient(x, **{bound: 1.0}) ** 2

    for f in (clipped, grad(clipped), jit(clipped)):
        with pytest.raises(NotImplementedError, match="clip_gradient: forward mode"):
            jvp(f, (array(2.0),), (array(1.0),))
    close(grad(grad(clipped))(array(0.1)), array(1.0))
    close(grad(clipped)(array(2.0)), array(1.0))


def test_clipping_an_infinite_gradient_is_nan():
    weights = array(np.float32([3.0, np.inf]))
    got = grad(lambda x: ops.sum(ops.clip_gradient(x, norm=1.0) * weights))(array(1.0, 1.0))
    assert np.isnan(numpy(got)).any()


@pytest.mark.parametrize("bound", ["value", "norm"])
def test_clipping_complex_gradients_raises(bound):
    with pytest.raises(TypeError, match="clip_gradient: x cannot be used") as error:
        ops.clip_gradient(array(3.0 + 4.0j, dtype="complex64"), **{bound: 1.0})
    assert "a real floating dtype" in str(error.value)
    close(ops.clip_gradient(array(3, dtype="int32"), **{bound: 1.0}), array(3, dtype="int32"))
