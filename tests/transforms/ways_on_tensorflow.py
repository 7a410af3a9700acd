"""The ways of TensorFlow to compute a gradient, see `ways.py`."""

import itertools

import tensorflow as tf


def by_a_tape(loss, persistent=False):
    def gradients(*xs):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(xs)
            value = loss(*xs)
        return tape.gradient(value, xs, unconnected_gradients="zero")

    return gradients


def by_the_graph(loss):
    def gradients(*xs):
        return tf.gradients(loss(*xs), xs, unconnected_gradients="zero")

    return tf.function(gradients, autograph=False)


def by_forward_mode(loss):
    def derivative(xs, place, direction):
        with tf.autodiff.ForwardAccumulator(xs[place], direction) as accumulator:
            value = loss(*xs)
        return accumulator.jvp(value, unconnected_gradients="zero")

    def gradients(*xs):
        found = []
        for place, x in enumerate(xs):
            count = x.shape.num_elements()
            basis = tf.reshape(tf.eye(count, dtype=x.dtype), (count, *x.shape))
            elements = [derivative(xs, place, direction) for direction in tf.unstack(basis)] if count else []
            found.append(tf.reshape(tf.cast(tf.stack(elements), x.dtype) if elements else x, x.shape))
        return found

    return gradients


WAYS = {
    "tf.GradientTape": by_a_tape,
    "a persistent tape": lambda loss: by_a_tape(loss, persistent=True),
    "tf.function": lambda loss: tf.function(by_a_tape(loss), autograph=False),
    "XLA": lambda loss: tf.function(by_a_tape(loss), autograph=False, jit_compile=True),
    "a tape around a tf.function": lambda loss: by_a_tape(tf.function(loss, autograph=False)),
    "tf.gradients": by_the_graph,
    "tf.autodiff.ForwardAccumulator": by_forward_mode,
}
LACKING = set()

EAGER = ["tf.GradientTape", "a persistent tape"]
"""The ways in which a function sees concrete values."""
# XLA requires a known length for the second derivative of a loop. `keras.remat` is `tf.recompute_grad`,
# which has no second derivative.
LACKING_OF_KERAS = {
    ("XLA", "keras.ops.scan"),
    *itertools.product(
        ["multigrad.grad", *WAYS, "multigrad.jit", "a gradient of multigrad.jit"], ["keras.remat"]
    ),
    *itertools.product(["keras.remat", "keras.ops.scan", "keras.ops.cond"], ["keras.remat"]),
}
# XLA cannot call the host.
LACKING_OF_HOST_CALLS = {"XLA"}
# Outside of a graph, a tape identifies tensors by object, and each position gets the sum of the gradients.
LACKING_OF_ONE_ARRAY = {
    "tf.GradientTape",
    "a persistent tape",
    "a tape around a tf.function",
    "tf.autodiff.ForwardAccumulator",
}
