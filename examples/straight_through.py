"""A Keras layer that quantizes, trained with and without a straight-through estimator.

    KERAS_BACKEND=jax python examples/straight_through.py

The derivative of rounding is zero almost everywhere, so the layers before it never learn. The
straight-through estimator (Bengio, Léonard, Courville, 2013, https://arxiv.org/abs/1308.3432) rounds in the
forward pass, and passes the gradient through in the backward pass as if rounding were the identity.
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
        # Outside of the range, the output is constant because of the clipping, so the gradient is zero.
        inside = ops.logical_and(x >= 0.0, x <= 1.0)
        return ops.where(inside, upstream, 0.0)

    return rounded(x), rule


class Quantize(keras.layers.Layer):
    """A layer that applies a quantization function to activations."""

    def __init__(self, quantize):
        super().__init__()
        self.quantize = quantize

    def call(self, x):
        return self.quantize(x)


# The data: points in the plane, and whether they lie in a ring.
points = np.random.default_rng(0).uniform(-1.0, 1.0, (2048, 2)).astype("float32")
radius = np.linalg.norm(points, axis=1)
in_ring = ((radius > 0.4) & (radius < 0.8)).astype("float32")


def fit(quantize):
    """Train a model. Return its accuracy, and the largest change of the weights before the quantizer."""
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


# On TensorFlow, Keras warns that the weights before plain rounding have no gradient. That is the point.
table = Table("quantizer", "accuracy", "change of the weights before it")
for name, quantize in (("rounding", rounded), ("straight-through", straight_through)):
    accuracy, change = fit(quantize)
    table.add_row(name, f"{accuracy:.1%}", f"{change:.3f}")

print(f"3-bit activations on {keras.backend.backend()}")
Console(width=80).print(table)
