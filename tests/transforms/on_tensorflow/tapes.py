"""Derivatives of a function of two vectors by TensorFlow's tapes."""

import pytest
import tensorflow as tf
from cases import CASES

some = pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "two outputs")])


def tape_gradient(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x)


def value_and_gradients(function, x, w):
    """Return the value in a larger graph, and the gradients."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y = tf.sin(function(x, w))
    return y, tape.gradient(y, [x, w])


def derivatives(function, x, w):
    """Return the same, and the second derivatives."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        y, (of_x, of_w) = value_and_gradients(function, x, w)
        slope = tf.reduce_sum(of_x**2) + tf.reduce_sum(of_w)
    return y, [of_x, of_w], tape.gradient(slope, [x, w])
