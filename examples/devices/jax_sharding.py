"""Gradients of an op on four devices with `jax.sharding`, `jax.shard_map` and `jax.pmap`.

    python examples/devices/jax_sharding.py

Four CPUs that JAX simulates stand for four GPUs or TPUs. The factor in the rule is wrong on purpose: a device
that ignored the rule would return other gradients.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from keras import ops

from multigrad import op_custom_gradient
from multigrad.ops import clip_gradient

jax.config.update("jax_platforms", "cpu")  # remove both lines to train on GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 4)

x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
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


keras.utils.set_random_seed(0)
models = {}
for activation in (plain, tripled, clipped):
    dense = keras.layers.Dense(8, activation=activation)
    models[activation] = keras.Sequential([keras.Input((4,)), dense, keras.layers.Dense(1)])
weights = [variable.value for variable in models[tripled].trainable_variables]


def loss_of(weights, x, y, activation=tripled):
    """`stateless_call` returns the outputs and the state of the model, which is empty here."""
    outputs, _ = models[activation].stateless_call(weights, [], x)
    return ops.mean((outputs - y) ** 2)


def on_one_device(activation):
    return jax.jit(jax.grad(lambda *args: loss_of(*args, activation)))(weights, x, y)


mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
rows, everywhere = PartitionSpec("rows"), PartitionSpec()


def sharded(activation):
    """Shard the batch. The compiler places the computation, and adds up over devices."""
    batch, target = (jax.device_put(array, NamedSharding(mesh, rows)) for array in (x, y))
    replicated = jax.device_put(weights, NamedSharding(mesh, everywhere))
    return jax.jit(jax.grad(lambda *args: loss_of(*args, activation)))(replicated, batch, target)


def by_shard_map(activation):
    """Compute the loss of each device, and differentiate the mean over devices."""

    def mean_loss(weights, x, y):
        return jax.lax.pmean(loss_of(weights, x, y, activation), "rows")

    mapped = jax.shard_map(mean_loss, mesh=mesh, in_specs=(everywhere, rows, rows), out_specs=everywhere)
    return jax.jit(jax.grad(mapped))(weights, x, y)


def by_pmap(activation):
    """Compute the gradients of each device, and return their mean."""

    def step(weights, x, y):
        return jax.lax.pmean(jax.grad(loss_of)(weights, x, y, activation), "rows")

    shares = (array.reshape(jax.device_count(), -1, array.shape[1]) for array in (x, y))
    means = jax.pmap(step, axis_name="rows", in_axes=(None, 0, 0))(weights, *shares)
    return [mean[0] for mean in means]


def difference(gradients, others):
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(gradients, others, strict=True))


alone = on_one_device(tripled)
print(f"jax.sharding on {jax.device_count()} devices, compared with one device:")
for name, way in {"jit of sharded arrays": sharded, "shard_map": by_shard_map, "pmap": by_pmap}.items():
    print(f"{name}: the gradients differ by {difference(way(tripled), alone):.0e}")
    print(f"  without the rule: by {difference(way(plain), alone):.0e}")
    # In `shard_map` and `pmap`, each device computes the norm of its own rows.
    norms = difference(way(clipped), on_one_device(clipped))
    print(f"  a rule that computes a norm over the batch: by {norms:.0e}")
