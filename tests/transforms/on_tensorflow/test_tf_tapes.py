"""`tf.GradientTape`: nested, persistent, with partial watching, and its Jacobians."""

import pytest
import tensorflow as tf
from cases import CASES, each_of
from support import close
from tapes import W, X, derivatives

cases = each_of()
ways = pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])


@cases
def test_nested(case):
    def third(function):
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            _, _, (of_x, of_w) = derivatives(function, X, W)
            curve = tf.reduce_sum(of_x * of_w)
        return tape.gradient(curve, [X, W])

    close(third(case.op), third(case.meant), 1e-4)


@cases
def test_persistent(case):
    def all_derivatives(function):
        with tf.GradientTape(persistent=True) as outer:
            outer.watch([X, W])
            with tf.GradientTape(persistent=True) as inner:
                inner.watch([X, W])
                y = tf.sin(function(X, W))
            firsts = [inner.gradient(y, by) for by in (X, W, X)]
        return firsts, [outer.gradient(of, [X, W]) for of in (y, *firsts)]

    close(all_derivatives(case.op), all_derivatives(case.meant), 1e-4)


@cases
def test_one_argument_watched(case):
    def first(function, watched):
        with tf.GradientTape() as tape:
            tape.watch(watched)
            y = function(X, W)
        return y, tape.gradient(y, [X, W], unconnected_gradients="zero")

    for watched in (X, W):
        close(first(case.op, watched), first(case.meant, watched), 1e-4)


@cases
def test_output_gradients(case):
    def first(function):
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            y = function(X, W)
        return tape.gradient(y, [X, W], output_gradients=3.0 * W)

    close(first(case.op), first(case.meant), 1e-4)


@cases
@ways
def test_jacobian(case, pfor):
    def jacobians(function):
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch([X, W])
            y = tf.sin(function(X, W))
        return tape.jacobian(y, [X, W], experimental_use_pfor=pfor)

    close(jacobians(case.op), jacobians(case.meant), 1e-4)
    if pfor:
        close(tf.function(lambda: jacobians(case.op))(), jacobians(case.meant), 1e-4)


@pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "sum")])
def test_jacobian_of_a_jacobian(case):
    def hessian(function):
        with tf.GradientTape() as outer:
            outer.watch([X, W])
            with tf.GradientTape() as tape:
                tape.watch(X)
                y = tf.sin(function(X, W))
            first = tape.jacobian(y, X)
        return outer.jacobian(first, [X, W])

    close(hessian(case.op), hessian(case.meant), 1e-4)


@pytest.mark.parametrize("case", [c for name, c in CASES.items() if name != "sum"])
@ways
def test_batch_jacobian(case, pfor):
    """`batch_jacobian` requires a function that does not mix rows."""
    x, w = tf.stack([X, 2.0 * X]), tf.stack([W, W])

    def jacobian(function):
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch(x)
            y = tf.sin(function(x, w))
        return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)

    close(jacobian(case.op), jacobian(case.meant), 1e-4)
