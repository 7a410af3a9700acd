"""Train a model with an op on four devices with `keras.distribution`, which runs on JAX.

    python examples/devices/keras_distribution.py

Four CPUs that JAX simulates stand for four GPUs or TPUs. The factor in the rule is wrong on purpose: a device
that ignored the rule would train other weights.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np
from keras import ops

import multigrad
from multigrad import op_custom_gradient, value_and_grad
from multigrad.ops import clip_gradient

jax.config.update("jax_platforms", "cpu")  # remove both lines to train on GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 4)

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


def model_of(activation):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(8, activation=activation, name="hidden")
    return keras.Sequential([keras.Input((4,)), dense, keras.layers.Dense(1)])


def fit(distribution, activation):
    """Train with `fit`. Return the weights, and the part of the hidden kernel that one device stores."""
    keras.distribution.set_distribution(distribution)
    model = model_of(activation)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    kernel = model.get_layer("hidden").kernel.value
    return model.get_weights(), kernel.sharding.shard_shape(kernel.shape)


def loop(distribution, activation):
    """Train with a loop of `value_and_grad` that `multigrad.jit` compiles, and return the weights."""
    keras.distribution.set_distribution(distribution)
    model, optimizer = model_of(activation), keras.optimizers.SGD(0.05)
    weights = model.trainable_variables
    optimizer.build(weights)

    @multigrad.jit
    def step(x, y):
        _, gradients = value_and_grad(lambda x, y: ops.mean((model(x) - y) ** 2), variables=weights)(x, y)
        optimizer.apply(gradients, weights)

    for batch, target in zip(np.split(x, STEPS), np.split(y, STEPS), strict=True):
        if distribution is not None:
            layout = distribution.get_data_layout(batch.shape)
            batch, target = (keras.distribution.distribute_tensor(a, layout) for a in (batch, target))
        step(batch, target)
    return model.get_weights()


def difference(weights, others):
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*hidden/kernel"] = (None, "model")
distributions = {
    "DataParallel": keras.distribution.DataParallel(),
    "ModelParallel with a LayoutMap": keras.distribution.ModelParallel(
        layout_map=layouts, batch_dim_name="batch"
    ),
}
alone, shape = fit(None, tripled)
print(f"keras.distribution on {jax.device_count()} devices, compared with one device:")
for name, distribution in distributions.items():
    together, part = fit(distribution, tripled)
    print(
        f"{name}: the weights differ by {difference(together, alone):.0e}; a device stores {part} of {shape}"
    )
    print(f"  in a loop of value_and_grad: by {difference(loop(distribution, tripled), alone):.0e}")
    print(f"  without the rule: by {difference(fit(distribution, plain)[0], alone):.0e}")
    # The rule gets the whole batch, as on one device.
    norms = difference(fit(distribution, clipped)[0], fit(None, clipped)[0])
    print(f"  a rule that computes a norm over the batch: by {norms:.0e}")
