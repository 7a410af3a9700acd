"""The errors of TensorFlow's backend: each fix works."""

import keras
import numpy as np
import tensorflow as tf
from fixing import Row, check
from keras import ops
from support import array

from multigrad import grad, op_custom_gradient, vmap
from multigrad.ops import cumprod, host_call

X = np.ones(3, "float32")


@op_custom_gradient
def tripled(x):
    return x * 2.0, lambda upstream: upstream * 3.0


def total(x):
    return ops.sum(tripled(x))


def ragged(is_flat):
    x = tf.RaggedTensor.from_row_lengths(X, [2, 1])
    return (tf.ragged.map_flat_values(tripled, x) if is_flat else tripled(x)).flat_values


def assigned(is_argument):
    """Return a gradient with respect to a variable that is assigned before a `tf.function` uses it."""
    weight = keras.Variable(3.0)
    traced = tf.function(lambda x: tripled(x) * weight)
    with_argument = tf.function(lambda x, value: tripled(x) * value)
    traced(array(2.0))

    def f(x):
        weight.assign(weight * 2.0)
        return with_argument(x, weight.value) if is_argument else traced(x)

    return grad(f, variables=[weight])(2.0)[0]


def growth(in_loop):
    rate = keras.Variable(2.0)

    @op_custom_gradient
    def op(x):
        if in_loop:
            y = ops.fori_loop(0, 2, lambda i, x: rate.assign(x * rate), x)
        else:
            y = rate.assign(ops.fori_loop(0, 2, lambda i, y: y * y, x * rate))
        return y, lambda upstream, variables: (upstream * 7.0, [upstream])

    return tf.function(grad(op))(tf.constant(2.0))


def rematerialized(is_argument):
    weight = keras.Variable(2.0)
    function = keras.remat(lambda x, w=None: tripled(x) * (weight if w is None else w))
    if is_argument:
        return grad(lambda w: function(2.0, w))(weight.value)
    return grad(function, variables=[weight])(2.0)


def product(shape):
    return tf.function(grad(lambda x: ops.sum(cumprod(tf.ensure_shape(x, shape)))),
        input_signature=[tf.TensorSpec((None,))])(X)  # fmt: skip


def pushed(f, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
        y = f(x)
    return forward.jvp(y)


@op_custom_gradient
def sine(x):
    slope = host_call(np.cos, x, output=x)
    return host_call(np.sin, x, output=x), lambda upstream: upstream * slope


@op_custom_gradient
def sine_of_ops(x):
    return host_call(np.sin, x, output=x), lambda upstream: upstream * 7.0 * ops.cos(x)


ROWS = [
    Row("compute the intermediate result in the rule", lambda: pushed(grad(sine), tf.constant(0.0)),
        lambda: pushed(grad(sine_of_ops), tf.constant(0.0)), 0.0, NotImplementedError),
    Row("compute the gradient in the mapped function",
        lambda: grad(lambda x: ops.sum(tf.vectorized_map(tripled, x)))(array(X)),
        lambda: vmap(grad(tripled))(array(X)), 3.0 * X, LookupError),
    Row("call tf.ragged.map_flat_values(op, x)", lambda: ragged(False), lambda: ragged(True), 2.0 * X),
    Row("pass the value of the variable to the tf.function as an argument", lambda: assigned(False),
        lambda: assigned(True), 8.0, NotImplementedError),
    Row("carry the value through the loop", lambda: growth(True), lambda: growth(False), 7.0),
    Row("pass `variable.value` to the function as an argument", lambda: rematerialized(False),
        lambda: rematerialized(True), 4.0),
    Row("set the shape with `tf.ensure_shape`", lambda: product((None,)), lambda: product((3,)),
        np.float32([3.0, 2.0, 1.0]), NotImplementedError),
]  # fmt: skip


def test_the_fixes_of_errors_on_tensorflow():
    check(ROWS, [], {})
