"""`tf.recompute_grad`: the function runs again in the backward pass."""

import pytest
import tensorflow as tf
from cases import CASES, each_of
from support import close
from tapes import W, X, derivatives, value_and_gradients

from multigrad import op_custom_gradient


@each_of()
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_gradients(case, wrap):
    again = tf.recompute_grad(lambda x, w: case.op(tf.sin(case.op(x, w)), w))
    got = wrap(lambda x, w: value_and_gradients(again, x, w))(X, W)
    close(got, value_and_gradients(lambda x, w: case.meant(tf.sin(case.meant(x, w)), w), X, W), 1e-3)


@pytest.mark.parametrize("function", [CASES["input"].op, CASES["input"].meant])
def test_a_second_derivative_raises(function):
    """TensorFlow (2.21) raises, for any function."""
    with pytest.raises(NotImplementedError, match="recompute_grad"):
        derivatives(tf.recompute_grad(function), X, W)


def test_number_of_runs_of_the_function():
    runs = []

    @op_custom_gradient
    def op(x, w):
        runs.append("function")
        return x * w, lambda u: runs.append("rule") or (u * 3.0, u * 7.0)

    _, gradients = value_and_gradients(tf.recompute_grad(op), X, W)
    close(gradients, [3.0 * tf.cos(X * W), 7.0 * tf.cos(X * W)])
    assert runs == ["function", "function", "rule"]
