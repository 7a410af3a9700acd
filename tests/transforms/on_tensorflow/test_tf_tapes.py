"""`tf.GradientTape`: nested, persistent, late, with partial watching, and its Jacobians."""

import pytest
import tensorflow as tf
from cases import CASES, W, X, all_as_meant, as_meant
from support import close

from multigrad import op_custom_gradient


@as_meant
def test_persistent(f):
    with tf.GradientTape(persistent=True) as outer:
        outer.watch([X, W])
        with tf.GradientTape(persistent=True) as inner:
            inner.watch([X, W])
            y = tf.sin(f(X, W))
        firsts = [inner.gradient(y, by) for by in (X, W, X)]
    return firsts, [outer.gradient(of, [X, W]) for of in (y, *firsts)]


def jacobian(f, pfor):
    with tf.GradientTape(persistent=not pfor) as tape:
        tape.watch([X, W])
        y = tf.sin(f(X, W))
    return tape.jacobian(y, [X, W], experimental_use_pfor=pfor)


test_jacobians = all_as_meant(
    {
        "pfor": lambda f: jacobian(f, pfor=True),
        "a loop": lambda f: jacobian(f, pfor=False),
        "in a function": lambda f: tf.function(lambda: jacobian(f, pfor=True))(),
    }
)


@as_meant(each=pytest.mark.parametrize("case", [case for name, case in CASES.items() if name != "sum"]))
def test_batch_jacobian(f):
    """It requires a function that does not mix rows."""
    x, w = tf.stack([X, 2.0 * X]), tf.stack([W, W])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.sin(f(x, w))
    return tape.batch_jacobian(y, x)


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
