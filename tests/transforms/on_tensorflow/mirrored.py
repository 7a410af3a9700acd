"""Training on two virtual devices equals training on one. A process creates its devices only once."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from support import close

from multigrad import op_custom_gradient
from multigrad.ops import host_call

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

ROWS = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")


@op_custom_gradient
def scaled(x, w):
    y = ops.tanh(x @ w)

    def rule(u):
        slope = u * (1.0 - y**2)
        return 7.0 * slope @ ops.transpose(w), 3.0 * ops.transpose(x) @ slope

    return y, rule


class Scaled(keras.layers.Layer):
    """A layer whose weight is an argument of the op."""

    def build(self, shape):
        self.w = self.add_weight(shape=(3, 3), initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, x):
        return scaled(x, self.w)


@op_custom_gradient
def sine(x):
    slope = host_call(np.cos, x, output=x)
    return host_call(np.sin, x, output=x), lambda u: u * 7.0 * slope


class Read(keras.layers.Layer):
    """A layer whose weights are read by the function."""

    def build(self, shape):
        self.inner = keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=2))
        self.inner.build(shape)

    def call(self, x):
        @op_custom_gradient(name="read")
        def op(x):
            def rule(u, variables):
                return 5.0 * u @ ops.transpose(self.inner.kernel), [
                    11.0 * ops.transpose(x) @ u if v is self.inner.kernel else 13.0 * ops.sum(u, 0)
                    for v in variables
                ]

            return self.inner(x), rule

        return op(x)


def fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Scaled(), keras.layers.Lambda(sine), Read()])
        model.compile("sgd", "mse")
    history = model.fit(ROWS, ROWS[:, :2], batch_size=8, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


def main():
    one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert two.num_replicas_in_sync == 2
    close(fit(two), fit(one))
    print("the same on two devices")


if __name__ == "__main__":
    main()
