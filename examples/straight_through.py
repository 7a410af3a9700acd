"""A straight-through quantizer in a Keras layer, and what it is for.

    KERAS_BACKEND=jax python examples/straight_through.py

Rounding is flat almost everywhere. Its true gradient is zero, so that no layer before it ever learns.
The straight-through estimator (Bengio, Léonard, Courville, 2013, https://arxiv.org/abs/1308.3432) rounds
on the way forward and passes the gradient on as if it had not.
"""

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from multigrad import op_custom_gradient

STEPS = 2**3 - 1  # three bits: eight levels in [0, 1]


def rounded(x):
    return ops.round(ops.clip(x, 0.0, 1.0) * STEPS) / STEPS


@op_custom_gradient
def straight_through(x):
    def rule(upstream):
        # Outside the range the clipping is meant, and its gradient is zero indeed.
        inside = ops.logical_and(x >= 0.0, x <= 1.0)
        return ops.where(inside, upstream, 0.0)

    return rounded(x), rule


class Quantize(keras.layers.Layer):
    """Activations on eight levels, by the function that it is given."""

    def __init__(self, quantize):
        super().__init__()
        self.quantize = quantize

    def call(self, x):
        return self.quantize(x)


# The data: points of the plane, and whether they lie in a ring.
points = np.random.default_rng(0).uniform(-1.0, 1.0, (2048, 2)).astype("float32")
radius = np.linalg.norm(points, axis=1)
in_ring = ((radius > 0.4) & (radius < 0.8)).astype("float32")


def fit(quantize):
    """Train on the ring: the accuracy, and how far the weights before the quantizer moved."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(64, kernel_initializer=keras.initializers.RandomUniform(-1.0, 1.0))
    model = keras.Sequential([hidden, Quantize(quantize), keras.layers.Dense(1)])
    model.build(points.shape)
    before = ops.convert_to_numpy(hidden.kernel).copy()
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    model.fit(points, in_ring, batch_size=128, epochs=30, verbose=0)
    _, accuracy = model.evaluate(points, in_ring, batch_size=len(points), verbose=0)
    return accuracy, np.abs(ops.convert_to_numpy(hidden.kernel) - before).max()


# TensorFlow warns that nothing has a gradient before the plain rounding, which is what this shows.
table = Table("quantizer", "accuracy", "change of the weights before it")
for name, quantize in (("rounding", rounded), ("straight-through", straight_through)):
    accuracy, moved = fit(quantize)
    table.add_row(name, f"{accuracy:.1%}", f"{moved:.3f}")

print(f"3-bit activations on {keras.backend.backend()}")
Console(width=80).print(table)
