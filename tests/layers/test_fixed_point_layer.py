"""The deep equilibrium layer: against unrolled code, in training, and with unsuitable cells."""

import keras
import numpy as np
import pytest
from support import array, close, numpy

from multigrad import layers, ops, value_and_grad

X = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")


def cell(scale=0.3, width=3):
    z, x = keras.Input((3,)), keras.Input((4,))
    own = keras.layers.Dense(
        width, kernel_initializer=keras.initializers.RandomUniform(-scale, scale, seed=1)
    )
    given = keras.layers.Dense(width, kernel_initializer=keras.initializers.RandomUniform(-1.0, 1.0, seed=2))
    return keras.Model([z, x], ops.tanh(own(z) + given(x)))


def unrolled(cell, x):
    z = ops.zeros((x.shape[0], 3))
    for _ in range(60):
        z = cell([z, x])
    return z


def test_values_and_gradients_equal_unrolled_code():
    """Values, and gradients with respect to the input and every weight of the cell."""
    layer = layers.FixedPoint(cell(), shape=(3,), tolerance=1e-6)
    weights = array(np.arange(15.0).reshape(5, 3))
    layer(array(X))
    assert len(layer.trainable_variables) == 4
    results = []
    for call in (layer, lambda x: unrolled(layer.cell, x)):
        loss = value_and_grad(
            lambda x, call=call: ops.sum(call(x) * weights), variables=layer.trainable_variables
        )
        results.append(loss(array(X)))
    close(*results, 1e-4)


@pytest.mark.parametrize(("rate", "epochs"), [(0.02, 12), pytest.param(0.01, 60, marks=pytest.mark.slow)])
def test_training(rate, epochs):
    keras.utils.set_random_seed(0)
    layer = layers.FixedPoint(cell(), shape=(3,))
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(rate), "mse")
    target = np.sin(X.sum(axis=1, keepdims=True))
    before = model.evaluate(X, target, verbose=0)
    model.fit(X, target, epochs=epochs, verbose=0)
    assert model.evaluate(X, target, verbose=0) < 0.5 * before


@pytest.mark.forward
def test_saving_includes_the_cell(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.FixedPoint(cell(), shape=(3,))])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.trainable_variables) == 4
    np.testing.assert_array_equal(numpy(loaded(array(X))), numpy(model(array(X))))
