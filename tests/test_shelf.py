"""The acceptance table: every op of `multigrad.ops` and every layer of `multigrad.layers`.

There is one row per op or layer, and one column per test. On every backend with gradients, the gradient is
the documented one, in eager and compiled code, and a model with it can be saved and loaded. On NumPy and
OpenVINO, the values are the same. `tests/ops` and `tests/layers` test the details.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from support import BACKEND, DIFFERENTIATES, array, close, compiled, native_jvp, numpy

from multigrad import grad, hessian, jacobian, jvp, layers, ops, vjp, vmap
from multigrad.testing import check_gradients


class Row(NamedTuple):
    """An op or a layer, as a function of a matrix of shape (2, 3)."""

    call: Callable[[Any], Any]
    value: Callable[[np.ndarray], np.ndarray]
    """The value in NumPy."""
    slope: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """The gradient for an upstream gradient, if it is not the derivative of `value`."""


X = np.float32([[0.25, -3.0, 1.0], [2.0, 0.5, -0.75]])
WEIGHTS = np.float32([[3.0, -5.0, 1.0], [2.0, 7.0, -4.0]])


@keras.saving.register_keras_serializable("shelf")
def heron(z, x):
    """Return the next step of Heron's method for the square root of `1 + x**2`."""
    return 0.5 * (z + (1.0 + x * x) / z)


@keras.saving.register_keras_serializable("shelf")
def root(x):
    return ops.sqrt(x)


def spectral(x, fn):
    """Return the row sums of a function of the positive definite matrix of the products of the rows."""
    x32 = ops.cast(x, "float32") if keras.backend.standardize_dtype(x.dtype) in HALVES else x
    a = ops.matmul(x32, ops.swapaxes(x32, -1, -2))
    return ops.cast(ops.sum(fn(a + ops.eye(2, dtype=a.dtype)), axis=-1), x.dtype)


def eigen(x):
    x = x.astype("float64")
    return np.linalg.eigh(x @ x.T + np.eye(2))


@keras.saving.register_keras_serializable("shelf")
def surplus(z, x):
    return z * z - (1.0 + x * x)


@keras.saving.register_keras_serializable("shelf")
def curved(z, x):
    return (1.0 + x * x) * z


@keras.saving.register_keras_serializable("shelf")
def bowl(z, x):
    return ops.sum(0.5 * (1.0 + x * x) * z * z - z)


@keras.saving.register_keras_serializable("shelf")
class Half(keras.layers.Layer):
    """A cell that returns the inputs plus half of their distance from `z`."""

    def call(self, inputs):
        z, x = inputs
        return x - 0.5 * z

    def compute_output_shape(self, input_shape):
        return input_shape[0]


KERNEL = np.float32([[1.0, -1.0, 0.5, 0.0], [0.0, 2.0, 1.0, -1.0], [0.5, 0.5, -2.0, 1.0]])
CODES = np.float32([[0.0, 0.0, 0.0], [2.0, 0.0, -1.0], [0.0, -3.0, 1.0]])


def cross_entropy(x):
    logits = x.astype("float64") @ KERNEL
    return np.log(np.exp(logits).sum(axis=-1)) - logits[[0, 1], [3, 0]]


def norms(u):
    return np.linalg.norm(u, axis=-1, keepdims=True)


floor = ops.straight_through(lambda x: ops.cast(ops.floor(x), x.dtype), name="shelf>floor")

ROWS = {
    # ops that change gradients
    "scale_gradient": Row(lambda x: ops.scale_gradient(x, 0.5), lambda x: x, lambda x, u: 0.5 * u),
    "reverse_gradient": Row(lambda x: ops.reverse_gradient(x, 7.0), lambda x: x, lambda x, u: -7.0 * u),
    "stop_gradient_if": Row(
        lambda x: ops.stop_gradient_if(x > 0.5, x), lambda x: x, lambda x, u: np.where(x > 0.5, 0.0, u)
    ),
    "clip_gradient": Row(
        lambda x: ops.clip_gradient(x, norm=1.0, axis=-1), lambda x: x, lambda x, u: u / norms(u)
    ),
    "print_gradient": Row(lambda x: ops.print_gradient(x, "shelf"), lambda x: x, lambda x, u: u),
    "prevent_gradient": Row(ops.prevent_gradient, lambda x: x, RuntimeError),
    # quantizing ops
    "straight_through": Row(floor, np.floor, lambda x, u: u),
    "round_straight_through": Row(ops.round_straight_through, np.round, lambda x, u: u),
    "sign_straight_through": Row(ops.sign_straight_through, np.sign, lambda x, u: u * (abs(x) <= 1.0)),
    "clip_straight_through": Row(
        lambda x: ops.clip_straight_through(x, -1.0, 0.5), lambda x: np.clip(x, -1.0, 0.5), lambda x, u: u
    ),
    "fake_quantize": Row(
        lambda x: ops.fake_quantize(x, 0.5, bits=3),
        lambda x: 0.5 * np.round(np.clip(x / 0.5, -4, 3)),
        lambda x, u: u * (x > -2.0) * (x < 1.5),
    ),
    "vector_quantize": Row(
        lambda x: ops.vector_quantize(x, array(CODES))[0], lambda x: CODES[[2, 1]], lambda x, u: u
    ),
    "spike": Row(ops.spike, lambda x: x > 0.0, lambda x, u: u / (1.0 + 10.0 * abs(x)) ** 2),
    # stable ops
    "log1pexp": Row(ops.log1pexp, lambda x: np.log1p(np.exp(x))),
    "logcosh": Row(ops.logcosh, lambda x: np.log(np.cosh(x))),
    "safe_norm": Row(lambda x: ops.safe_norm(x, axis=-1), lambda x: np.linalg.norm(x, axis=-1)),
    "safe_sqrt": Row(lambda x: ops.safe_sqrt(x * x + 1.0), lambda x: np.sqrt(x * x + 1.0)),
    "safe_log": Row(lambda x: ops.safe_log(x * x + 1.0), lambda x: np.log(x * x + 1.0)),
    "safe_divide": Row(lambda x: ops.safe_divide(x, x * x + 1.0), lambda x: x / (x * x + 1.0)),
    # functions of symmetric matrices
    "spectral_function": Row(
        lambda x: spectral(x, lambda a: ops.spectral_function(a, root)),
        lambda x: (eigen(x)[1] * np.sqrt(eigen(x)[0]) @ eigen(x)[1].T).sum(axis=-1),
    ),
    "safe_eigh": Row(
        lambda x: spectral(x, lambda a: ops.square(ops.safe_eigh(a)[1][:, :1])),
        lambda x: np.square(eigen(x)[1][:, 0]),
    ),
    "safe_svd": Row(
        lambda x: spectral(x, lambda a: ops.square(ops.safe_svd(a)[0][:, :1])),
        lambda x: np.square(eigen(x)[1][:, 1]),
    ),
    # solutions of equations
    "fixed_point": Row(lambda x: ops.fixed_point(heron, ops.ones_like(x), x), lambda x: np.sqrt(1.0 + x * x)),
    "implicit_root": Row(
        lambda x: ops.implicit_root(surplus, ops.ones_like(x), x), lambda x: np.sqrt(1.0 + x * x)
    ),
    "linear_solve": Row(
        lambda x: ops.linear_solve(curved, ops.ones_like(x), x), lambda x: 1.0 / (1.0 + x * x)
    ),
    "implicit_argmin": Row(
        lambda x: ops.implicit_argmin(bowl, ops.zeros_like(x), x), lambda x: 1.0 / (1.0 + x * x)
    ),
    # a loss
    "linear_cross_entropy": Row(
        lambda x: ops.linear_cross_entropy(x, array(KERNEL), np.int32([3, 0])), cross_entropy
    ),
    # layers
    "GradientScale": Row(layers.GradientScale(0.5), lambda x: x, lambda x, u: 0.5 * u),
    "GradientReversal": Row(layers.GradientReversal(7.0), lambda x: x, lambda x, u: -7.0 * u),
    "GradientClip": Row(layers.GradientClip(value=2.0), lambda x: x, lambda x, u: np.clip(u, -2.0, 2.0)),
    "FakeQuantize": Row(
        layers.FakeQuantize(bits=3, step=0.5),
        lambda x: 0.5 * np.round(np.clip(x / 0.5, -4, 3)),
        lambda x, u: u * (x > -2.0) * (x < 1.5),
    ),
    "VectorQuantizer": Row(
        layers.VectorQuantizer(3, initializer=keras.initializers.Constant(CODES)),
        lambda x: CODES[[2, 1]],
        lambda x, u: u,
    ),
    "Spike": Row(layers.Spike(0.5), lambda x: x > 0.5, lambda x, u: u / (1.0 + 10.0 * abs(x - 0.5)) ** 2),
    "LinearCrossEntropy": Row(
        layers.LinearCrossEntropy(3, kernel_initializer=keras.initializers.Constant(KERNEL[:, :3])),
        lambda x: x @ KERNEL[:, :3],
    ),
    "FixedPoint": Row(layers.FixedPoint(Half(), shape=(3,)), lambda x: 2.0 * x / 3.0),
}
HALVES = {"float16": 1e-2, "bfloat16": 3e-2}
DTYPES = [*HALVES, "float32", *(["float64"] if BACKEND in ("tensorflow", "torch") else [])]

every = pytest.mark.parametrize("name", ROWS)
# These compute a dense matrix, whose rows are gradients.
NEWTON = ("implicit_root", "linear_solve", "implicit_argmin")
COSTLY = (*NEWTON, "fixed_point", "FixedPoint", "linear_cross_entropy")  # expensive to compile
COSTLY += ("spectral_function", "safe_eigh", "safe_svd")


@pytest.fixture(autouse=True)
def built(request):
    """Build a layer before it is compiled, because weights from `jax.jit` would be tracers."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in layers.__all__ and not ROWS[name].call.built:
        ROWS[name].call.build(X.shape)


def test_every_op_and_layer_has_a_row():
    own = {name for name in ops.__all__ if not hasattr(keras.ops, name)}
    own.remove("host_call")  # it has no derivative, see tests/ops/test_host_call.py
    assert {*ROWS} == own | {*layers.__all__}


def weights_of(name):
    """Return the upstream gradient, with as many elements as the value."""
    return WEIGHTS[:, 0] if ROWS[name].value(X).ndim == 1 else WEIGHTS


def slope(name, call):
    weights = array(weights_of(name))
    return grad(lambda x: ops.sum(ops.cast(call(x), "float32") * weights))


@pytest.mark.forward
@every
def test_the_value(name):
    row = ROWS[name]
    if BACKEND == "openvino" and name in ("spectral_function", "safe_eigh", "safe_svd"):
        pytest.skip("Keras (3.15) ends the process in eigh on OpenVINO, and does not support svd there")
    if name in NEWTON and not DIFFERENTIATES:
        with pytest.raises(NotImplementedError, match="tensorflow, jax, torch"):
            row.call(array(X))
    else:
        close(row.call(array(X)), array(row.value(X)))


@pytest.mark.parametrize(
    ("name", "extent"),
    [
        *[pytest.param(name, {}, id=name, marks=pytest.mark.slow if name in COSTLY else ()) for name in ROWS],
        *[pytest.param(name, {"max_elements": 1, "compiled": False}, id=f"{name}, few") for name in COSTLY],
    ],
)
def test_the_gradient_is_the_documented_one(name, extent):
    row = ROWS[name]
    if row.slope is None:
        # Dynamo (PyTorch 2.13) warns that it runs functions uncompiled that use an object such as a layer.
        compiled = {"compiled": (BACKEND, name) != ("torch", "FixedPoint")}
        check_gradients(row.call, X, **compiled | extent)
    elif row.slope is RuntimeError:
        with pytest.raises(RuntimeError, match=name):
            slope(name, row.call)(array(X))
    else:
        close(slope(name, row.call)(array(X)), array(row.slope(X, weights_of(name))))


@every
def test_compiled(name):
    row = ROWS[name]
    if row.slope is RuntimeError:
        with pytest.raises(RuntimeError, match=name):
            compiled(slope(name, row.call))(array(X))
    else:
        close(compiled(slope(name, row.call))(array(X)), slope(name, row.call)(array(X)))


NOT_LINEAR = ("clip_gradient", "GradientClip")


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@every
def test_forward_mode(name, wrap):
    """The framework's own forward mode computes the transpose of the gradient."""
    call, x, along = ROWS[name].call, array(X), array(np.cos(np.arange(X.size)).reshape(X.shape))
    forward = wrap(lambda x, along: native_jvp(lambda x: ops.cast(call(x), "float32"), x, along))
    if ROWS[name].slope is RuntimeError:
        with pytest.raises(RuntimeError, match=name):
            forward(x, along)
        return
    if name in NOT_LINEAR:
        with pytest.raises(NotImplementedError, match="the rule, which is not linear"):
            forward(x, along)
        return
    if BACKEND == "tensorflow" and name == "FixedPoint":
        with pytest.raises(RuntimeError, match="the function uses a hidden tensor"):
            forward(x, along)
        return
    pushed, pulled = forward(x, along), slope(name, call)(x)
    close(ops.sum(pushed * array(weights_of(name))), ops.sum(pulled * along), 1e-4)


def with_labels_for_rows(name):
    """Return the op or layer, for any number of rows."""
    if name != "linear_cross_entropy":
        return ROWS[name].call
    return lambda x: ops.linear_cross_entropy(x, array(KERNEL), ops.zeros(x.shape[:1], "int32"))


SPECTRAL = {"spectral_function", "safe_eigh", "safe_svd"}  # of the rows together, see ops/test_spectral.py
WITH_GRADIENT = [name for name in ROWS if ROWS[name].slope is not RuntimeError]
OF_ROWS = [name for name in WITH_GRADIENT if name not in SPECTRAL]


@pytest.mark.parametrize("name", OF_ROWS)
def test_no_rows(name):
    f, x, shape = with_labels_for_rows(name), array(X[:0]), (0, *ROWS[name].value(X).shape[1:])
    of_sum = lambda x: ops.sum(ops.cast(f(x), "float32"))  # noqa: E731
    assert tuple(f(x).shape) == shape
    assert tuple(grad(of_sum)(x).shape) == (0, 3)
    assert tuple(grad(lambda x: ops.sum(grad(of_sum)(x) ** 2))(x).shape) == (0, 3)
    if name not in NOT_LINEAR:
        assert tuple(jvp(f, (x,), (x,))[1].shape) == shape
    assert tuple(jacobian(f)(x).shape) == (*shape, 0, 3)
    assert tuple(hessian(of_sum)(x).shape) == (0, 3, 0, 3)


@every
def test_maps_of_no_elements_of_one_and_of_two(name):
    row, one, two = ROWS[name], array(X[None]), array(np.stack([X, 2.0 * X - 1.0]))
    of_sum = lambda x: ops.sum(ops.cast(row.call(x), "float32"))  # noqa: E731
    close(vmap(row.call)(one)[0], row.call(one[0]))
    assert tuple(vmap(row.call)(one[:0]).shape) == (0, *row.value(X).shape)
    close(vmap(row.call)(two), ops.stack([row.call(x) for x in two]), 1e-4)
    if row.slope is not RuntimeError:
        close(vmap(grad(of_sum))(one)[0], grad(of_sum)(one[0]))
        slopes = ops.stack([grad(of_sum)(x) for x in two])
        close(vmap(grad(of_sum))(two), slopes, 1e-4)
        close(grad(lambda xs: ops.sum(vmap(of_sum)(xs)))(two), slopes, 1e-4)
        assert tuple(vmap(grad(of_sum))(one[:0]).shape) == (0, 2, 3)
        assert tuple(grad(lambda xs: ops.sum(vmap(of_sum)(xs)))(one[:0]).shape) == (0, 2, 3)


@contextlib.contextmanager
def debugging():
    """Turn on the debug switches of the framework."""
    if BACKEND == "jax":
        import jax

        with (
            jax.debug_nans(True),
            jax.debug_infs(True),
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
        ):
            yield
    elif BACKEND == "torch":
        import torch

        with torch.autograd.set_detect_anomaly(True):
            yield
    else:
        import tensorflow as tf

        tf.debugging.enable_check_numerics()
        try:
            yield
        finally:
            tf.debugging.disable_check_numerics()


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_debug_switches_of_the_framework(name, wrap):
    if wrap is compiled and name in (*NEWTON, "fixed_point", "FixedPoint"):
        pytest.skip("a compiled solution of an equation computes a NaN for a failure")
    derivative = slope(name, ROWS[name].call)
    wanted = derivative(array(X))
    with debugging():
        close(wrap(derivative)(array(X)), wanted)


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("reduction", [None, "mean"])
def test_the_debug_switches_with_every_option_of_the_cross_entropy(reduction):
    def loss(x, bias):
        losses = ops.linear_cross_entropy(
            x, array(KERNEL), np.int32([3, -1]), bias, reduction=reduction, ignore_index=-1,
            class_weight=np.ones(4, "float32"), label_smoothing=0.1, logit_softcap=5.0, z_loss=0.1,
        )  # fmt: skip
        return ops.sum(losses)

    x, bias, slopes = array(X), array(1.0, 2.0, 3.0, 4.0), grad(loss, (0, 1))
    twice = grad(lambda x, bias: ops.sum(slopes(x, bias)[1] ** 2), (0, 1))
    derivative = compiled(slopes) if reduction else twice
    wanted = derivative(x, bias)
    with debugging():
        close(derivative(x, bias), wanted)


def solve_by_gmres(b):
    return ops.linear_solve(lambda x: 2.0 * x + 0.5 * ops.flip(x, -1), b, solver="gmres", batched=True)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: ops.safe_eigh(x @ ops.swapaxes(x, -1, -2))[1] ** 2,
        lambda x: ops.safe_svd(x)[0] ** 2,
        layers.LinearCrossEntropy(3, use_bias=True),
        pytest.param(solve_by_gmres, marks=pytest.mark.slow_on("jax", "tensorflow")),
    ],
    ids=["safe_eigh", "safe_svd", "LinearCrossEntropy", "linear_solve"],
)
def test_the_debug_switches_with_a_batch(f):
    """The inputs of the shelf are matrices. With more axes, JAX's `rank_promotion` finds other operations."""
    x = array(np.stack([X, 2.0 * X - 1.0]))
    f(x)  # builds a layer, in which Keras (3.15) promotes ranks
    derivative = grad(lambda x: ops.sum(ops.tanh(f(x))))
    wanted = derivative(x)
    with debugging():
        close(derivative(x), wanted)


def test_the_debug_switches_with_derivatives():
    f = lambda x: ops.tanh(x) * ops.sum(x, axis=-1, keepdims=True)  # noqa: E731
    total = lambda x: ops.sum(f(x))  # noqa: E731

    def derivatives(x):
        matrices = jacobian(f)(x), jacobian(f)(x[:0]), hessian(total)(x), vmap(grad(total))(x[None])
        return *matrices, jvp(f, (x,), (x,)), vjp(f, x)[1](x)

    x = array(X)
    wanted = derivatives(x)
    with debugging():
        close(derivatives(x), wanted)
        check_gradients(f, X, dtype="float32", compiled=False)


# Layers have their own dtypes, see tests/layers.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in layers.__all__])
def test_the_dtype(name, dtype):
    row = ROWS[name]
    x, exact = array(X, dtype=dtype), 1e-5
    value = row.call(x)
    wanted = "float32" if name == "linear_cross_entropy" and dtype in HALVES else dtype
    assert keras.backend.standardize_dtype(value.dtype) == wanted
    close(ops.cast(value, "float32"), array(row.value(X)), HALVES.get(dtype, exact))
    if row.slope is not RuntimeError:
        got = slope(name, row.call)(x)
        assert keras.backend.standardize_dtype(got.dtype) == dtype
        close(ops.cast(got, "float32"), slope(name, row.call)(array(X)), 3 * HALVES.get(dtype, exact))


@every
def test_saving_a_functional_model(name, tmp_path):
    x = keras.Input((3,), batch_size=2)
    model = keras.Model(x, ROWS[name].call(x))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    close(loaded(array(X)), ROWS[name].call(array(X)))
    if ROWS[name].slope is not RuntimeError:
        close(slope(name, loaded)(array(X)), slope(name, ROWS[name].call)(array(X)))


class Around(keras.layers.Layer):
    """A layer of a user, which calls an op or a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


# These rows first call ops of Keras, which do not accept a sparse placeholder.
PREPARED = {"stop_gradient_if", "safe_sqrt", "safe_log", "safe_divide"}
PREPARED |= {"spectral_function", "safe_eigh", "safe_svd"}
if not DIFFERENTIATES:
    PREPARED |= set(NEWTON)  # see test_the_value
if BACKEND == "openvino":  # Keras does not run `fixed_point` on placeholders there, see docs/limits
    PREPARED |= {"fixed_point", "FixedPoint"}


@pytest.mark.forward
@pytest.mark.parametrize("name", [name for name in ROWS if name not in PREPARED])
def test_a_layer_after_a_product(name):
    """Keras (3.15) reports that such a product is sparse."""
    x = keras.Input((3,), batch_size=2)
    model = keras.Model(x, Around(ROWS[name].call)(2.0 * x))
    close(model(array(X / 2.0)), ROWS[name].call(array(X)))


# tests/layers trains the layers. The labels of the cross entropy here are for two rows.
@pytest.mark.parametrize("name", [n for n in ROWS if n not in {*layers.__all__, "linear_cross_entropy"}])
def test_fit_with_an_unknown_batch_size(name):
    """One step of `fit`, in which TensorFlow does not know the batch size, moves a weight before the op."""
    row = ROWS[name]
    dense = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity")

    def fit():
        x = keras.Input((3,))
        model = keras.Model(x, row.call(dense(x)))
        model.compile(keras.optimizers.SGD(0.125), loss=weighted, jit_compile=BACKEND == "jax")
        model.fit(X, weights_of(name), verbose=0)

    def weighted(weights, y):
        return ops.sum(ops.cast(y, "float32") * ops.reshape(weights, ops.shape(y)))

    if row.slope is RuntimeError:
        with pytest.raises(RuntimeError, match=name):
            fit()
    else:
        fit()
        by_kernel = X.T @ numpy(slope(name, row.call)(array(X)))
        close(dense.kernel, array(np.eye(3) - 0.125 * by_kernel), 1e-4)
