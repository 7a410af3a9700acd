"""`tf.recompute_grad`: the function runs again in the backward pass."""

import pytest
import tensorflow as tf
from cases import W, X, as_meant
from support import close
from tapes import value_and_gradients

from multigrad import op_custom_gradient


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
@as_meant(tolerance=1e-3)
def test_gradients(f, wrap):
    again = tf.recompute_grad(lambda x, w: f(tf.sin(f(x, w)), w))
    return wrap(lambda x, w: value_and_gradients(again, x, w))(X, W)


def test_number_of_runs_of_the_function():
    runs = []

    @op_custom_gradient
    def op(x, w):
        runs.append("function")
        return x * w, lambda u: runs.append("rule") or (u * 3.0, u * 7.0)

    _, gradients = value_and_gradients(tf.recompute_grad(op), X, W)
    close(gradients, [3.0 * tf.cos(X * W), 7.0 * tf.cos(X * W)])
    assert runs == ["function", "function", "rule"]
