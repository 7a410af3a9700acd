"""Factors of gradients that change during training, and invalid arguments."""

import keras
import numpy as np
from support import array, close, numpy

from multigrad import grad, layers


def test_assigning_a_factor():
    layer = layers.GradientReversal(1.0)
    close(grad(lambda x: 3.0 * layer(x))(2.0), array(-3.0))
    layer.scale.assign(0.5)
    close(grad(lambda x: 3.0 * layer(x))(2.0), array(-1.5))
    assert layer.get_config()["scale"] == 1.0


def moved(scale, epochs=1):
    """Return how far the weight before a reversal moves against its gradient, in each epoch of one step."""

    class Schedule(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if not callable(scale):
                layer.scale.assign(scale[epoch])

        def on_epoch_end(self, epoch, logs=None):
            found.append(numpy(dense.kernel).item())

    layer = layers.GradientReversal(scale if callable(scale) else 1.0)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense, layer])
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: y * p)
    found = [0.0]
    model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=epochs, verbose=0, callbacks=[Schedule()])
    return np.diff(found)


def test_assigning_a_factor_in_a_callback():
    """The compiled step reads the current factor in each epoch."""
    close(moved([0.5, 7.0, 0.0], 3), np.float64([0.5, 7.0, 0.0]))


def test_clipping_with_a_loss_scale():
    for optimizer, wanted in (
        (keras.optimizers.SGD(1.0), 0.5),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0), 0.125),
    ):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense, layers.GradientClip(value=0.5)])
        model.compile(optimizer, lambda y, p: y * p)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
        close(dense.kernel, array([[-wanted]]))


def test_a_schedule():
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [3.0, 7.0, 11.0])
    close(moved(decay, 4), np.float64([3.0, 7.0, 11.0, 11.0]))


@keras.saving.register_keras_serializable("test_routing_layers")
def ramp(step):
    return 3.0 + 4.0 * step


def test_a_function_of_the_step():
    close(moved(ramp, 3), np.float64([3.0, 7.0, 11.0]))
    config = keras.saving.serialize_keras_object(layers.GradientReversal(ramp))
    copied = keras.saving.deserialize_keras_object(config)
    close(grad(lambda x: copied(x))(1.0), array(-3.0))


def test_a_schedule_counts_training_calls_only():
    layer = layers.GradientScale(keras.optimizers.schedules.ExponentialDecay(8.0, 1, 0.5))

    def slope(training):
        return numpy(grad(lambda x: layer(x, training=training))(1.0)).item()

    assert [slope(training) for training in (False, True, True, False)] == [8.0, 8.0, 4.0, 2.0]
