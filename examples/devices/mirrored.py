"""Train a model with an op on two devices with `tf.distribute.MirroredStrategy`.

    python examples/devices/mirrored.py

Two logical CPUs stand for two GPUs. The factor in the rule is wrong on purpose: a replica that ignored the
rule would train other weights.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # before Keras is imported

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from multigrad import op_custom_gradient, value_and_grad
from multigrad.ops import clip_gradient

(cpu,) = tf.config.list_physical_devices("CPU")  # remove both lines to train on GPUs
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

STEPS, BATCH = 10, 16
x = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))


def plain(x):
    return ops.tanh(x)


@op_custom_gradient
def tripled(x):
    y = ops.tanh(x)
    return y, lambda upstream: 3.0 * upstream * (1.0 - y * y)


def clipped(x):
    """The norm of the gradient is that of all rows that the rule gets."""
    return clip_gradient(ops.tanh(x), norm=0.01)


def clipped_rows(x):
    return clip_gradient(ops.tanh(x), norm=0.01, axis=-1)


def model_of(activation):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation=activation), keras.layers.Dense(1)]
    )


def fit(strategy, activation):
    """Train with `fit`, and return the weights."""
    with strategy.scope():
        model = model_of(activation)
        model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model.get_weights()


def loop(strategy, activation):
    """Train with a loop of `value_and_grad`, and return the weights."""
    with strategy.scope():
        model, optimizer = model_of(activation), keras.optimizers.SGD(0.05)
        weights = model.trainable_variables
        optimizer.build(weights)

    def loss_of(x, y):
        # `optimizer.apply` adds the gradients of all replicas, so each replica has its share of the mean.
        return ops.mean((model(x) - y) ** 2) / strategy.num_replicas_in_sync

    def replica_step(x, y):
        _, gradients = value_and_grad(loss_of, variables=weights)(x, y)
        optimizer.apply(gradients, weights)

    step = tf.function(lambda x, y: strategy.run(replica_step, (x, y)))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for batch in strategy.experimental_distribute_dataset(data):
        step(*batch)
    return model.get_weights()


def difference(weights, others):
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print(f"MirroredStrategy on {two.num_replicas_in_sync} devices, compared with one device:")
alone = fit(one, tripled)
print(f"fit: the weights differ by {difference(fit(two, tripled), alone):.0e}")
print(f"a loop of value_and_grad: by {difference(loop(two, tripled), alone):.0e}")
print(f"without the rule: by {difference(fit(two, plain), alone):.0e}")
# Each replica computes the norm of its own rows.
print(
    f"a rule that computes a norm over the batch: by {difference(fit(two, clipped), fit(one, clipped)):.0e}"
)
print(f"a norm for each row: by {difference(fit(two, clipped_rows), fit(one, clipped_rows)):.0e}")
