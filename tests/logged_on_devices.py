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
from logged_models import BATCH, eager_tensors, targets  # noqa: E402

from multigrad.callbacks import GradientLogger  # noqa: E402
from multigrad.callbacks.records import TENSORS  # noqa: E402


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


def train(*callbacks, **options):
    with scope():
        case = logged_models.dense()
        random = np.random.default_rng(0)
        for variable in case.model.trainable_variables:
            variable.assign(random.normal(size=variable.shape) * 0.5)
        case.model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    y = targets(case.x)
    case.model.fit(case.x, y, batch_size=BATCH, shuffle=False, verbose=0, epochs=2, callbacks=list(callbacks))
    return case


# On one device.
one = logged_models.dense()
random = np.random.default_rng(0)
for variable in one.model.trainable_variables:
    variable.assign(random.normal(size=variable.shape) * 0.5)
wanted = eager_tensors(one, one.x[:BATCH], targets(one.x)[:BATCH], 1.0)

logger = GradientLogger(every=2, stop_on_nan=True, restore_weights=True)
logged, plain = train(logger), train()
assert [record.step for record in logger.records] == [0, 2, 4]
for kind in TENSORS:
    table = getattr(logger.records[0], kind)
    assert sorted(table) == sorted(wanted[kind])
    for path, statistics in table.items():
        array = wanted[kind][path]
        assert statistics.size == array.size, (kind, path, statistics)
        np.testing.assert_allclose(statistics.norm, np.linalg.norm(array), 1e-5, err_msg=f"{kind} {path}")
        np.testing.assert_allclose(statistics.largest, abs(array).max(), 1e-5)
for variable, other in zip(logged.model.variables, plain.model.variables, strict=True):
    np.testing.assert_array_equal(variable.numpy(), other.numpy())
state = [variable.numpy() for variable in logged.model.variables]
x = one.x.copy()
x[0] = np.nan
logged.model.fit(x, targets(one.x), batch_size=BATCH, shuffle=False, verbose=0, callbacks=[logger])
assert logger.diagnosis == "Step 6, forward: NaN first appears in the output of first.", logger.diagnosis
for variable, value in zip(logged.model.variables, state, strict=True):
    np.testing.assert_array_equal(variable.numpy(), value)
print("the same on two devices")
