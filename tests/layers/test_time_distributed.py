"""Layers in `keras.layers.TimeDistributed`, which calls them once per time step."""

import keras
import numpy as np
import pytest
from keras import ops
from support import array, close, numpy

from multigrad import grad, layers

X = np.random.default_rng(0).standard_normal((2, 5, 4)).astype("float32")  # five time steps


def alone_and_distributed(make):
    """Return two equal layers, and a model with each: one plain, one in TimeDistributed."""
    one, other = make(), make()
    wrapped = keras.layers.TimeDistributed(other)
    models = [keras.Sequential([keras.Input((5, 4)), layer]) for layer in (one, wrapped)]
    return (one, other), models


def test_the_gradient_of_a_learned_step():
    """The gradient is `sqrt(5)` times as large, as the docstring of the layer says."""
    quantizers, models = alone_and_distributed(lambda: layers.FakeQuantize(bits=3, step=0.5))
    alone, distributed = [
        grad(lambda m=model: ops.sum(m(X) * array(X**2)), variables=[layer.step])()[0]
        for layer, model in zip(quantizers, models, strict=True)
    ]
    close(distributed, np.sqrt(5.0) * alone)


@pytest.mark.forward
def test_the_loss_of_a_codebook():
    """The layer adds five losses, whose sum is five times the mean."""
    codes = keras.initializers.Constant(X[0, :3])
    _, models = alone_and_distributed(lambda: layers.VectorQuantizer(3, initializer=codes))
    for model in models:
        model(X)
    alone, distributed = [np.array([float(numpy(loss)) for loss in model.losses]) for model in models]
    assert (alone.shape, distributed.shape) == ((1,), (5,))
    np.testing.assert_allclose(distributed.sum(), 5.0 * alone[0], rtol=1e-5)


@pytest.mark.forward
@pytest.mark.parametrize("kind", [layers.GradientScale, layers.GradientReversal])
def test_a_schedule_counts_time_steps(kind):
    scales, models = alone_and_distributed(lambda: kind(keras.optimizers.schedules.PolynomialDecay(1.0, 10)))
    for model in models:
        model(X, training=True)
    assert [int(numpy(scale.steps)) for scale in scales] == [1, 5]
