"""Learned steps and codebooks."""

import keras
import numpy as np
import pytest
from support import array, close, numpy

from multigrad import layers

DATA = np.random.default_rng(0).normal(size=(1000, 3)) * [1.0, 2.0, 0.5]


@pytest.mark.forward
def test_the_initial_step():
    """The step of the paper, 2 E|x| / sqrt(7) for 4 bits. A normal variable has E|x| = sqrt(2 / pi)."""
    layer = layers.FakeQuantize(4)
    layer.build((None, 3))
    close(layer.step, array(2.0 * np.sqrt(2.0 / np.pi / 7.0)))


@pytest.mark.forward
def test_adapt():
    mean = np.abs(DATA).mean(axis=0)
    one, each = layers.FakeQuantize(4), layers.FakeQuantize(4, axis=1)
    one.adapt(DATA)
    each.adapt(DATA)
    close(one.step, array(2.0 * mean.mean() / np.sqrt(7.0)))
    close(each.step, array(2.0 * mean / np.sqrt(7.0)))
    with pytest.raises(ValueError, match=r"the data is all zero(.|\n)*fix"):
        each.adapt(DATA * [1.0, 0.0, 1.0])
    close(each.step, array(2.0 * mean / np.sqrt(7.0)))


def test_training_keeps_steps_positive():
    layer = layers.FakeQuantize(3, axis=-1, step=0.01)
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    before = model.evaluate(DATA, DATA, verbose=0)
    model.fit(DATA, DATA, epochs=8, verbose=0)
    assert model.evaluate(DATA, DATA, verbose=0) < 0.1 * before
    assert np.argsort(numpy(layer.step)).tolist() == [2, 0, 1]
    model.compile(keras.optimizers.SGD(1e9), "mse")
    model.fit(DATA, DATA, verbose=0)
    assert (numpy(layer.step) > 0.0).all()


VECTORS = np.random.default_rng(1).normal(size=(6, 5, 2)).astype("float32")


def test_the_loss_of_a_codebook():
    """Equation 3 of the paper: the squared distance, weighted by 1 for the codebook and 0.25 for inputs."""
    layer = layers.VectorQuantizer(4, initializer=keras.initializers.RandomNormal(seed=3))
    quantized = numpy(layer(array(VECTORS)))
    codes = numpy(layer.codebook)
    distances = ((VECTORS[..., None, :] - codes) ** 2).sum(axis=-1)
    indices = distances.argmin(axis=-1)
    np.testing.assert_array_equal(quantized, codes[indices])
    np.testing.assert_array_equal(numpy(layer.indices(array(VECTORS))), indices)
    np.testing.assert_array_equal(numpy(layer.vectors(array(indices, dtype="int32"))), quantized)
    (loss,) = layer.losses
    close(loss, array(1.25 * distances.min(axis=-1).mean()))


@pytest.mark.forward
def test_masked_vectors_do_not_count_in_the_loss():
    layer = layers.VectorQuantizer(4, initializer=keras.initializers.RandomNormal(seed=3))
    mask = np.arange(30).reshape(6, 5) % 3 == 0
    layer(array(VECTORS), mask=array(mask, dtype="bool"))
    distances = ((VECTORS[..., None, :] - numpy(layer.codebook)) ** 2).sum(axis=-1).min(axis=-1)
    close(layer.losses[0], array(1.25 * distances[mask].mean()))
    layer(array(VECTORS), mask=array(np.zeros((6, 5)), dtype="bool"))
    assert [numpy(loss).item() for loss in layer.losses][-1] == 0.0
