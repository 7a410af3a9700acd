"""`tf.GradientTape`: nested, persistent, late, with partial watching, and its Jacobians."""

import pytest
import tensorflow as tf
from cases import CASES, W, X, as_meant
from support import close
from tapes import derivatives

from multigrad import op_custom_gradient

ways = pytest.mark.parametrize("pfor", [True, False], ids=["pfor", "loop"])


@as_meant
def test_nested(f):
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        _, _, (of_x, of_w) = derivatives(f, X, W)
        curve = tf.reduce_sum(of_x * of_w)
    return tape.gradient(curve, [X, W])


@as_meant
def test_persistent(f):
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([X, W])
        with tf.GradientTape(persistent=True) as inner:
            inner.watch([X, W])
            y = tf.sin(f(X, W))
        firsts = [inner.gradient(y, by) for by in (X, W, X)]
    return firsts, [outer.gradient(of, [X, W]) for of in (y, *firsts)]


@pytest.mark.parametrize("watched", [X, W], ids=["x", "w"])
@as_meant
def test_one_argument_watched(f, watched):
    with tf.GradientTape() as tape:
        tape.watch(watched)
        y = f(X, W)
    return y, tape.gradient(y, [X, W], unconnected_gradients="zero")


@as_meant
def test_output_gradients(f):
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        y = f(X, W)
    return tape.gradient(y, [X, W], output_gradients=3.0 * W)


def jacobians(f, pfor):
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch([X, W])
        y = tf.sin(f(X, W))
    return tape.jacobian(y, [X, W], experimental_use_pfor=pfor)


@ways
@as_meant
def test_jacobian(f, pfor):
    return jacobians(f, pfor)


@as_meant
def test_jacobian_in_a_function(f):
    return tf.function(lambda: jacobians(f, pfor=True))()


@as_meant(each=pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "sum")]))
def test_jacobian_of_a_jacobian(f):
    with tf.GradientTape() as outer:
        outer.watch([X, W])
        with tf.GradientTape() as tape:
            tape.watch(X)
            y = tf.sin(f(X, W))
        first = tape.jacobian(y, X)
    return outer.jacobian(first, [X, W])


@ways
@as_meant(each=pytest.mark.parametrize("case", [c for name, c in CASES.items() if name != "sum"]))
def test_batch_jacobian(f, pfor):
    """`batch_jacobian` requires a function that does not mix rows."""
    x, w = tf.stack([X, 2.0 * X]), tf.stack([W, W])
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch(x)
        y = tf.sin(f(x, w))
    return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)


# ----------------------------------------------------------------- tapes that begin after the op


def closing_over(w):
    return op_custom_gradient(lambda x: (x * x, lambda u: -3.0 * u * w * w))


def around_the_rule(first, x, y, w):
    """Return what a tape that begins here records of the rule's use of `w`."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = tf.reduce_sum(first.gradient(y, x) * w)
    return tape.gradient(loss, w)


def behind(x, w, f):
    with tf.GradientTape() as first:
        first.watch(x)
        y = f(x)
    return around_the_rule(first, x, y, w)


def stopped(x, w, f):
    with tf.GradientTape() as tape:
        tape.watch(w)
        with tape.stop_recording(), tf.GradientTape() as first:
            first.watch(x)
            y = f(x)
        loss = tf.reduce_sum(first.gradient(y, x) * w)
    return tape.gradient(loss, w)


def way_in_branch(way, x, w):
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: way(x, w, closing_over(w)), lambda: x)


def of_argument(way, x, w):
    f = op_custom_gradient(lambda x, w: (x * w, lambda u: (-3.0 * u * w * w, 5.0 * u)))
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: way(x, w, lambda x: f(x, w)), lambda: x)


LATE = {
    "eager": lambda way, x, w: way(x, w, closing_over(w)),
    "around": lambda way, x, w: tf.function(lambda x: way(x, w, closing_over(w)))(x),
    "argument": tf.function(lambda way, x, w: way(x, w, closing_over(w))),
    "nested": tf.function(lambda way, x, w: tf.function(lambda x: way(x, w, closing_over(w)))(x)),
    "branch": tf.function(way_in_branch),
    "argument of the op in a branch": tf.function(of_argument),
}


@pytest.mark.parametrize("way", [behind, stopped])
@pytest.mark.parametrize("where", LATE.values(), ids=LATE)
def test_a_tape_that_begins_after_the_op_records_the_rule(where, way):
    w = W
    close(where(way, X, w), -9.0 * w**2)


@tf.function
def from_within(x, w):
    def branch():
        with tf.GradientTape(persistent=True) as first:
            first.watch(x)
            y = closing_over(w)(x)
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: around_the_rule(first, x, y, w), lambda: x)

    return tf.cond(tf.reduce_sum(x) > 0.0, branch, lambda: x)


def test_a_tape_in_a_nested_branch_records_the_rule():
    w = W
    close(from_within(X, w), -9.0 * w**2)


def test_a_tape_that_begins_after_the_op():
    """An inner function computes the gradient. The residuals of the rule are from outside of both."""

    @tf.function
    def of_the_rule(x, w):
        @tf.function
        def within(u):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = CASES["input"].op(x, w)
            with tf.GradientTape() as behind:
                behind.watch(w)
                slope = tf.function(lambda u: tape.gradient(y, x, u))(u)
            return behind.gradient(slope, w)

        return within(tf.ones_like(x))

    close(of_the_rule(X, W), 21.0 * X**2)
