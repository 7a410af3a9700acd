"""Common properties of layers: config, models of each kind, saving, masks and mixed precision."""

from functools import partial

import keras
import numpy as np
import pytest
from support import BACKEND, DIFFERENTIATES, array, close, is_keras_at_least, numpy

from multigrad import grad, layers, ops

Decay = keras.optimizers.schedules.ExponentialDecay
Normal = keras.initializers.RandomNormal


@keras.saving.register_keras_serializable("test")
class Half(keras.layers.Layer):
    """A cell that returns the inputs minus half of `z`."""

    def call(self, inputs):
        z, x = inputs
        return x - 0.5 * z


# Each layer, and its gradient for an upstream gradient in NumPy, by definition.
LAYERS = {
    "GradientScale": (partial(layers.GradientScale, 0.5), lambda x, u: 0.5 * u),
    "GradientScale, scheduled": (partial(layers.GradientScale, Decay(0.25, 10, 0.5)), lambda x, u: 0.25 * u),
    "GradientReversal": (partial(layers.GradientReversal, 7.0), lambda x, u: -7.0 * u),
    "GradientClip, value": (partial(layers.GradientClip, value=2.0), lambda x, u: np.clip(u, -2.0, 2.0)),
    "GradientClip, norm": (
        partial(layers.GradientClip, norm=1.0, axis=-1),
        lambda x, u: u / np.linalg.norm(u, axis=-1, keepdims=True),
    ),
    "FakeQuantize": (partial(layers.FakeQuantize, 3, step=0.5), lambda x, u: u * (abs(x + 0.25) < 1.75)),
    "FakeQuantize, unsigned, by channels": (
        partial(layers.FakeQuantize, 2, signed=False, axis=-1, step=0.5),
        lambda x, u: u * (x > 0.0) * (x < 1.5),
    ),
    "Spike": (partial(layers.Spike, 0.25), lambda x, u: u / (1.0 + 10.0 * abs(x - 0.25)) ** 2),
    "Spike, arctan": (
        partial(layers.Spike, surrogate="arctan", slope=1.0),
        lambda x, u: u * 0.5 / (1.0 + (np.pi / 2 * x) ** 2),
    ),
    "VectorQuantizer": (
        lambda **k: layers.VectorQuantizer(4, initializer=Normal(seed=1), **k),
        lambda x, u: u,
    ),
    "FixedPoint": (lambda **k: layers.FixedPoint(Half(), **k), lambda x, u: u / 1.5),
}
X = np.float32([[0.25, -3.0, 1.0], [2.0, 0.5, -0.75]])
WEIGHTS = np.float32([[3.0, -5.0, 1.0], [2.0, 7.0, -4.0]])

every_layer = pytest.mark.parametrize("name", LAYERS)
HALF = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
POLICIES = ["float32", *HALF, *(["float64"] if BACKEND in ("tensorflow", "torch") else [])]


def slope(model):
    return grad(lambda x: ops.sum(ops.cast(model(x), "float32") * array(WEIGHTS)))


def same(one, other):
    """Assert that two models have the same values and, on a backend with gradients, the same gradients."""
    close(one(array(X)), other(array(X)), 0.0)
    if DIFFERENTIATES:
        close(slope(one)(array(X)), slope(other)(array(X)), 0.0)


@pytest.mark.forward
@pytest.mark.parametrize("name", LAYERS)
def test_the_config(name):
    layer = LAYERS[name][0](name="own")
    layer(array(X))
    again = type(layer).from_config(layer.get_config())
    assert again.name == "own"
    assert again.get_config() == layer.get_config()
    same(layer, again)
    same(layer, keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer)))


@pytest.mark.forward
@every_layer
@pytest.mark.parametrize("kind", ["Sequential", "Functional"])
def test_saving_a_model(name, kind, tmp_path):
    layer = LAYERS[name][0]()
    inputs = keras.Input((3,))
    model = keras.Sequential([inputs, layer]) if kind == "Sequential" else keras.Model(inputs, layer(inputs))
    assert model.output_shape == (None, 3)
    for weight in layer.weights:
        weight.assign(2 * weight + 1 if weight.dtype == "int32" else 1.5 * weight)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    close([numpy(w) for w in loaded.weights], [numpy(w) for w in model.weights], 0.0)
    same(model, loaded)


@pytest.mark.forward
@every_layer
def test_any_rank_and_unknown_dimensions(name):
    layer = LAYERS[name][0]()
    assert layer(keras.Input((None, 3))).shape == (None, None, 3)
    assert LAYERS[name][0]().compute_output_shape((None, 3)) == (None, 3)
    assert tuple(layer(array(np.ones((2, 4, 3)))).shape) == (2, 4, 3)


@pytest.mark.parametrize("policy", POLICIES)
@every_layer
def test_precision(name, policy):
    make, wanted = LAYERS[name]
    layer = make(dtype=policy)
    assert keras.backend.standardize_dtype(layer(array(X)).dtype) == HALF.get(policy, policy)
    assert {w.dtype for w in layer.weights} <= {"float32", "int32"}
    close(slope(layer)(array(X)), array(wanted(X, WEIGHTS)), 1e-2 if policy in HALF else 1e-5)


class Mask(keras.layers.Layer):
    """A layer that returns its mask."""

    def call(self, inputs, mask=None):
        return ops.cast(mask, "int32")

    def compute_mask(self, inputs, mask=None):
        return None


@pytest.mark.forward
@pytest.mark.skipif(not is_keras_at_least("3.14"), reason="older versions pass no mask, nor with Activation")
@every_layer
def test_masks_propagate(name):
    model = keras.Sequential([keras.layers.Masking(mask_value=-3.0), LAYERS[name][0](), Mask(dtype="int32")])
    close(model(array(X[:, :, None] * np.ones(3))), array([[1, 0, 1], [1, 1, 1]], dtype="int32"))


@pytest.mark.parametrize(
    ("layer", "right"),
    [
        (layers.GradientClip(value=np.float32(2.0)), layers.GradientClip(value=2.0)),
        (layers.GradientClip(norm=np.float64(1), axis=np.int64(-1)), layers.GradientClip(norm=1.0, axis=-1)),
        (layers.FakeQuantize(np.int64(4), axis=np.int64(-1)), layers.FakeQuantize(4, axis=-1)),
        (
            layers.FakeQuantize(np.int64(3), np.bool_(True), step=np.float32(0.5)),
            layers.FakeQuantize(3, True, step=0.5),
        ),
        (layers.VectorQuantizer(np.int64(8), np.float32(0.5)), layers.VectorQuantizer(8, 0.5)),
        (layers.Spike(np.float64(0.25), slope=np.int64(3)), layers.Spike(0.25, slope=3)),
    ],
)
def test_numpy_scalars_are_options(layer, right):
    """An op treats them as tensors: it would compute their gradient, or return their dtype."""
    own, wanted = layer.get_config(), right.get_config()
    assert {key: type(own[key]) for key in own} == {key: type(wanted[key]) for key in own}
    assert own | {"name": right.name} == wanted
    layer.dtype_policy = keras.DTypePolicy("mixed_float16")
    assert keras.backend.standardize_dtype(layer(X).dtype) == "float16"


@every_layer
def test_fit(name):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3), LAYERS[name][0](), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    before = [numpy(weight) for weight in model.trainable_weights]
    model.fit(X, X[:, :1], epochs=2, verbose=0)
    after = [numpy(weight) for weight in model.trainable_weights]
    assert all(np.isfinite(weight).all() for weight in after)
    assert any(np.any(a != b) for a, b in zip(before[:2], after[:2], strict=True))
    if name == "GradientScale, scheduled":
        assert numpy(model.layers[1].steps) == 2
