"""`host_call`: Python code on NumPy arrays, in eager and compiled code, models and maps."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, FIT_MODES, array, close, compiled, numpy

from multigrad import grad, jit, op_custom_gradient, vmap
from multigrad.ops import host_call

FAST = {"backend": "eager"} if BACKEND == "torch" else {}


@keras.saving.register_keras_serializable("test_host_call")
def double(x):
    return x + x  # `x * 2` is float64 for a scalar on NumPy 1


def unregistered(x):
    return x * 2


def half(x):
    return x[..., ::2].copy()


@op_custom_gradient
def sine(x):
    """Return the sine, with a false derivative: seven times the cosine."""
    y = host_call(np.sin, x, output=x)
    return y, lambda upstream: upstream * 7.0 * cosine(x)


@op_custom_gradient
def cosine(x):
    return host_call(np.cos, x, output=x), lambda upstream: upstream * -3.0 * sine(x)


WAYS = {"eager": lambda f: f, "compiled": compiled, "jit": lambda f: jit(f, **FAST)}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


# ------------------------------------------------------------------------------- values


@pytest.mark.forward
@ways
def test_structures_integers_booleans_and_keywords(way):
    seen = []

    def function(tree, n, *, scale, mode):
        seen.append((type(tree["a"]), tree["b"][0].dtype.name, n, mode))
        return {
            "y": tree["a"] * scale.astype("float32") * n,
            "more": (tree["b"][0] + np.int32(1), tree["a"] > 1, 4),
        }

    def f(a, b):
        output = {"y": a, "more": (b, keras.KerasTensor((2,), "bool"), keras.KerasTensor((), "int32"))}
        return host_call(function, {"a": a, "b": (b,)}, 3, output=output, scale=b, mode="text")

    got = way(f)(array([1.0, 2.0]), array([5, 6], dtype="int32"))
    close(got["y"], array([15.0, 36.0]))
    assert [numpy(leaf).tolist() for leaf in got["more"]] == [[6, 7], [False, True], 4]
    assert set(seen) == {(np.ndarray, "int32", 3, "text")}


@pytest.mark.forward
@ways
def test_output_as_a_function(way):
    def shape(x, step=2):
        return keras.KerasTensor((*x.shape[:-1], x.shape[-1] // step), x.dtype)

    close(way(lambda x: host_call(half, x, output=shape))(array([1.0, 2.0, 3.0, 4.0])), array([1.0, 3.0]))


@pytest.mark.forward
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "bool", "complex64"])
def test_dtypes(dtype):
    if BACKEND == "openvino" and dtype == "complex64":
        pytest.skip("OpenVINO has no complex numbers")
    x = ops.cast(array([0.0, 1.0]), dtype)
    got = host_call(np.copy, x, output=x)
    assert keras.backend.standardize_dtype(got.dtype) == dtype
    assert numpy(ops.cast(ops.real(got) if dtype == "complex64" else got, "float32")).tolist() == [0.0, 1.0]


@pytest.mark.forward
def test_no_tensors_and_variables():
    v = keras.Variable([1.0, 2.0])
    close(host_call(double, v, output=v), array([2.0, 4.0]))
    filled = host_call(lambda n: np.full(2, n, "float32"), 3.0, output=keras.KerasTensor((2,), "float32"))
    close(filled, array([3.0, 3.0]))


@pytest.mark.forward
def test_arrays_are_read_only_and_results_are_copied():
    kept = np.ones(2, "float32")

    def change(x):
        x[0] = 5.0
        return x

    x = array([1.0, 2.0])
    with pytest.raises(ValueError, match="read-only"):
        host_call(change, x, output=x)
    y = host_call(lambda x: kept, x, output=x)
    kept[0] = 9.0
    close(y, array([1.0, 1.0]))
    close(host_call(lambda x: x, x, output=x), x)


def test_large_arrays_in_compiled_code():
    got = compiled(lambda x: host_call(double, x * 1.0, output=x) + 1.0)(np.ones(2_000_000, "float32"))
    assert numpy(got)[-1] == 3.0


# ------------------------------------------------------------------------------- gradients


@ways
@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_rule_around_the_call(way, order):
    f = sine
    for _ in range(order):
        f = grad(f)
    if BACKEND == "torch" and way is not WAYS["eager"] and order > 1:
        f = WAYS["eager"](f)  # PyTorch (2.13) does not compile second derivatives with custom gradients
    else:
        f = way(f)
    wanted = [7.0 * np.cos(0.5), -21.0 * np.sin(0.5), -147.0 * np.cos(0.5)]
    close(f(array(0.5)), array(wanted[order - 1]), 1e-4)


@ways
def test_a_gradient_without_a_rule_raises(way):
    f = way(lambda x: ops.sum(host_call(double, x * 3.0, output=x)))
    with pytest.raises(
        TypeError,
        match=r"(?s)host_call of 'double'( in lambda)?: the call has no derivative.*a rule around the call",
    ):
        grad(f)(array([1.0, 2.0]))
    with pytest.raises(TypeError, match="the call has no derivative"):
        grad(lambda x: ops.sum(x * host_call(double, x, output=x)))(array(1.0))


def test_a_second_derivative_through_a_host_call_in_a_rule_raises():
    @op_custom_gradient
    def f(x):
        slope = host_call(np.cos, x, output=x)
        return host_call(np.sin, x, output=x), lambda upstream: upstream * slope

    close(grad(f)(0.0), array(1.0))
    with pytest.raises(TypeError, match="host_call of 'cos' in f: the call has no derivative"):
        grad(grad(f))(0.5)


def test_constants_need_no_gradient():
    def f(x, n):
        return (
            x
            * host_call(double, ops.stop_gradient(x), output=x)
            * ops.cast(host_call(double, n, output=n), x.dtype)
        )

    close(grad(f)(array(3.0), array(2, dtype="int32")), array(24.0))


# ------------------------------------------------------------------------------- models


@pytest.mark.parametrize("mode", FIT_MODES)
def test_fit(mode):
    if BACKEND == "tensorflow" and mode.get("jit_compile"):
        pytest.skip("XLA on TensorFlow cannot call the host, see the test of the error below")
    w = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Lambda(sine, output_shape=(1,))(w(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", **mode)
    x = np.array([[0.5]], "float32")
    model.fit(x, np.zeros((1, 1), "float32"), verbose=0)
    wanted = 1.0 - 0.1 * 2.0 * np.sin(0.5) * 7.0 * np.cos(0.5) * 0.5
    close(w.kernel, array([[wanted]]), 1e-4)


@pytest.mark.forward
@pytest.mark.skipif(BACKEND == "openvino", reason="Keras (3.15) uses placeholders without values there")
def test_saving_a_functional_model(tmp_path):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, host_call(double, inputs, output=inputs) + 1.0)
    assert model.output_shape == (None, 3)
    x = np.ones((2, 3), "float32")
    close(model(x), np.full((2, 3), 3.0))
    close(model.predict(x, verbose=0), np.full((2, 3), 3.0))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    close(loaded(x), np.full((2, 3), 3.0))
    other = keras.Model(inputs, host_call(unregistered, inputs, output=inputs))
    with pytest.raises(NotImplementedError, match="an argument cannot be saved"):
        other.save(tmp_path / "other.keras")


# ------------------------------------------------------------------------------- errors


def text_of(error):
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


MISFITS = {
    "shape": (lambda x: x[:1], r"output.*required: \(2,\).*got: \(1,\)"),
    "dtype": (lambda x: x.astype("float64"), r"required: an array of dtype float32.*float64.*np.asarray"),
    "structure": (lambda x: (x, x), r"required: float32 \(2,\).*got: tuple"),
    "none": (lambda x: None, r"required: an array of dtype float32.*got: None"),
    "number": (lambda x: 1.5, r"required: \(2,\).*got: \(\)"),
}


@pytest.mark.forward
@ways
@pytest.mark.parametrize("misfit", MISFITS)
def test_results_are_checked(way, misfit):
    function, text = MISFITS[misfit]
    f = way(lambda x: host_call(function, x, output=x))
    with pytest.raises(Exception, match=rf"(?s)host_call of 'lambda': the function returns another.*{text}"):
        numpy(f(array([1.0, 2.0])))


@pytest.mark.forward
def test_messages_name_the_function_and_the_leaf():
    for function, name in ((np.sin, "sin"), (np.vectorize(half), "half")):
        with pytest.raises(TypeError, match=f"host_call of '{name}'"):
            host_call(function, array(1.0), output=None)
    with pytest.raises(TypeError, match=r"(?s)argument: output\['a'\]\[1\].*got: .*int64"):
        host_call(lambda x: {"a": [x, np.int64(1)]}, array(1.0), output={"a": [array(1.0), array(1.0)]})


@pytest.mark.forward
def test_exceptions_of_the_function():
    def fail(x):
        raise KeyError("missing")

    x = array(1.0)
    with pytest.raises(KeyError, match="missing") as error:
        host_call(fail, x, output=x)
    assert "host_call of 'fail'" in text_of(error)
    with pytest.raises(Exception, match="missing") as error:
        numpy(compiled(lambda x: host_call(fail, x, output=x))(x))
    assert "host_call of 'fail'" in text_of(error)
    assert "KeyError" in text_of(error) or error.type is KeyError


@pytest.mark.skipif(BACKEND != "tensorflow", reason="on other backends the compiler can call the host")
def test_xla_on_tensorflow():
    f = jit(lambda x: host_call(double, x, output=x), jit_compile=True)
    with pytest.raises(Exception, match="host_call_cannot_run_with_jit_compile"):
        f(array(1.0))


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX has an option for 64 bits")
def test_64_bits_on_jax():
    from multigrad.backend.jax.private import enable_x64

    output = keras.KerasTensor((), "float64")
    with pytest.raises(TypeError, match=r"(?s)without 64-bit numbers.*float32.*jax_enable_x64"):
        host_call(np.float64, array(1.0), output=output)
    with enable_x64(True):
        assert host_call(np.float64, array(1.0), output=output).dtype == "float64"


# ------------------------------------------------------------------------------- maps


@pytest.mark.parametrize("vectorized", [False, True])
def test_vmap(vectorized):
    shapes = []

    def add(x, y):
        shapes.append(x.shape)
        return x + y

    def f(x, y):
        return host_call(add, x, y, output=x, vectorized=vectorized)

    x, y = array(np.ones((4, 3))), array(np.full((4, 3), 2.0))
    close(vmap(f)(x, y), np.full((4, 3), 3.0))
    once = vectorized and BACKEND != "tensorflow"
    assert shapes == ([(4, 3)] if once else [(3,)] * 4)
    close(vmap(f, (0, None))(x, y[0]), np.full((4, 3), 3.0))
    close(vmap(vmap(f))(x[:, None], y[:, None]), np.full((4, 1, 3), 3.0))


def test_vmap_of_a_gradient():
    close(vmap(grad(sine))(array([0.0, 0.5])), 7.0 * np.cos([0.0, 0.5]), 1e-4)
    with pytest.raises(TypeError, match="no derivative"):
        vmap(grad(lambda x: host_call(double, x, output=x)))(array([0.0, 0.5]))


@pytest.mark.skipif(BACKEND == "tensorflow", reason="it calls the function once per example")
def test_a_vectorized_function_without_the_batch_axis_raises():
    f = lambda x: host_call(lambda x: x.sum(0), x, output=x, vectorized=True)  # noqa: E731
    with pytest.raises(Exception, match=r"(?s)required: \(4, 3\).*omit vectorized=True"):
        numpy(vmap(f)(array(np.ones((4, 3)))))
