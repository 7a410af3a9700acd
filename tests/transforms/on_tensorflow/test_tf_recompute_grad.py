"""`tf.recompute_grad`: the function runs again in the backward pass."""

import pytest
import tensorflow as tf
from cases import CASES
from support import close
from tapes import W, X, derivatives, value_and_gradients

from multigrad import op_custom_gradient


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_derivatives(case, wrap):
    again = tf.recompute_grad(case.op)
    close(wrap(lambda x, w: derivatives(again, x, w))(X, W), derivatives(case.meant, X, W), 1e-4)


def test_a_function_of_ops():
    def twice(function):
        return lambda x, w: function(tf.sin(function(x, w)), w)

    for case in CASES.values():
        again = tf.recompute_grad(twice(case.op))
        close(derivatives(again, X, W), derivatives(twice(case.meant), X, W), 1e-3)


def test_how_often_the_function_runs():
    runs = []

    @op_custom_gradient
    def op(x, w):
        runs.append("function")
        return x * w, lambda u: runs.append("rule") or (u * 3.0, u * 7.0)

    _, gradients = value_and_gradients(tf.recompute_grad(op), X, W)
    close(gradients, [3.0 * tf.cos(X * W), 7.0 * tf.cos(X * W)])
    assert runs == ["function", "function", "rule"]
