"""`GradientLogger` on two virtual devices records what it records on one. A process creates devices once."""

import contextlib

import keras

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    # Before the import of `logged_models`, which creates tensors.
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

import logged_models  # noqa: E402
import numpy as np  # noqa: E402
from logged_models import BATCH, check_tensors, eager_tensors, fit, made, targets  # noqa: E402

from multigrad.callbacks import GradientLogger  # noqa: E402


def scope():
    if BACKEND == "tensorflow":
        devices = [f"CPU:{i}" for i in range(2)]
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
        ).scope()
    import jax

    assert jax.device_count() == 2
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices("cpu")))
    return contextlib.nullcontext()


def train(*callbacks):
    with scope():
        case = made(logged_models.dense)
    fit(case.model, case.x, targets(case.x), *callbacks, epochs=2)
    return case.model


def values_of(model):
    return [variable.numpy() for variable in model.variables]


one = made(logged_models.dense)  # on one device
wanted = eager_tensors(one, one.x[:BATCH], targets(one.x)[:BATCH], 1.0)
logger = GradientLogger(every=2, stop_on_nan=True, restore_weights=True)
logged, plain = train(logger), train()
assert [record.step for record in logger.records] == [0, 2, 4]
check_tensors(logger.records[0], wanted, 1e-5)
values = values_of(logged)
for value, other in zip(values, values_of(plain), strict=True):
    np.testing.assert_array_equal(value, other)
x = one.x.copy()
x[0] = np.nan
fit(logged, x, targets(one.x), logger)
assert logger.diagnosis == "Step 6, forward: NaN first appears in the output of first.", logger.diagnosis
for value, before in zip(values_of(logged), values, strict=True):
    np.testing.assert_array_equal(value, before)
print("the same on two devices")
