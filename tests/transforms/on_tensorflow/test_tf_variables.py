"""Variables that an op reads: in nested graphs, in functions that are traced before, and `tf.Variable`."""

import keras
import pytest
import tensorflow as tf
from keras import ops
from support import close

from multigrad import op_custom_gradient

X = tf.constant([1.0, 2.0])


WAYS_WITHIN = {
    "tf.cond": lambda f, x: tf.cond(tf.reduce_sum(x) > 0, lambda: f(x), lambda: x),
    "tf.while_loop": lambda f, x: tf.while_loop(lambda i, x: i < 1, lambda i, x: (i + 1, f(x)), (0, x))[1],
    "tf.map_fn": tf.map_fn,
    "tf.vectorized_map": tf.vectorized_map,
    "ops.cond": lambda f, x: ops.cond(ops.sum(x) > 0, lambda: f(x), lambda: x),
    "ops.while_loop": lambda f, x: ops.while_loop(lambda x, i: i < 1, lambda x, i: (f(x), i + 1), (x, 0))[0],
    "ops.scan": lambda f, x: ops.scan(lambda carry, x: (carry, f(x)), 0.0, x)[1],
    "ops.fori_loop": lambda f, x: ops.fori_loop(0, 1, lambda i, x: f(x), x),
    "within one another": lambda f, x: tf.map_fn(lambda x: tf.cond(x > 0, lambda: f(x), lambda: x), x),
    "tf.function": lambda f, x: tf.function(f)(x),
    "tf.function in a branch": lambda f, x: tf.cond(x[0] > 0, lambda: tf.function(f)(x), lambda: x),
}


class Scale(keras.layers.Layer):
    """A layer whose op reads its weight and a frozen weight in a given way."""

    def __init__(self, within, nested=False):
        super().__init__()
        self.within, self.nested = within, nested

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0))
        self.frozen = self.add_weight(shape=(), initializer="ones")
        self.frozen.trainable = False

    def call(self, x):
        @op_custom_gradient
        def inner(x):
            return x * self.scale * self.frozen, lambda u, variables: (u * 5.0, [ops.sum(u) * 11.0])

        @op_custom_gradient
        def op(x):
            def rule(u, variables):
                assert [variable is self.scale for variable in variables] == [True]
                return u * 3.0 * self.scale, [ops.sum(u) * 7.0]

            product = inner if self.nested else lambda x: x * self.scale * self.frozen
            return self.within(product, x), rule

        return op(x)


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@pytest.mark.parametrize("options", [None, {}, {"jit_compile": True}], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", WAYS_WITHIN)
def test_a_weight_that_is_first_read_in_a_nested_graph(way, nested, options):
    if nested and way == "tf.vectorized_map":
        pytest.skip("TensorFlow copies the inner op without its rule, which raises")
    layer = Scale(WAYS_WITHIN[way], nested)
    layer.build((2,))

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, *tape.gradient(y, [x, layer.scale.value])

    function = both if options is None else tf.function(both, **options)
    close(function(X), (2 * X, tf.constant([6.0, 6.0]), tf.constant(14.0)))


@pytest.mark.parametrize("traced_before", [False, True])
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_a_function_that_is_traced_once_is_differentiated_in_each_call(wrap, traced_before):
    traced = []
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((None, 2))

    @tf.function
    def dense(x):
        traced.append(1)
        return layer(x)

    if traced_before:
        dense(X[None])

    @op_custom_gradient
    def op(x):
        return dense(x), lambda u, variables: (x * 3.0, [ops.ones(v.shape) * 7.0 for v in variables])

    def gradient(x):
        with tf.GradientTape() as tape:
            y = op(x)
        return tape.gradient(y, layer.kernel.value)

    for _ in range(3):
        close(wrap(gradient)(X[None]), tf.fill([2, 1], 7.0))
    close(dense(2 * X[None]), 2 * X[None] @ layer.kernel.value)
    assert len(traced) == 1


def test_a_nested_trace_keeps_no_value():
    weight = keras.Variable(2.0)
    product = tf.function(lambda x: x * weight)
    op = op_custom_gradient(lambda x: (product(x) + weight, lambda u, variables: (u, [ops.sum(u) * 7.0])))
    close(op(X), 2 * X + 2)
    weight.assign(5.0)
    close(product(X), 5 * X)
    close(op(X), 5 * X + 5)


def test_the_value_of_a_variable_is_the_variable():
    """On TensorFlow, `variable.value` is the tf.Variable itself."""
    weight = keras.Variable([2.0, 3.0])
    value = weight.value
    op = op_custom_gradient(lambda x: (x * value, lambda u, variables: (u * 3.0, [u * 7.0])))
    for function in (op, tf.function(op)):
        with tf.GradientTape() as tape:
            y = function(X)
        close(tape.gradient(y, value), tf.constant([7.0, 7.0]))


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_a_tf_variable(wrap):
    raw = tf.Variable([2.0, 3.0], name="raw")
    other = tf.Variable([5.0, 5.0], trainable=False)

    @op_custom_gradient
    def op(x):
        def rule(u, variables):
            assert [variable is raw for variable in variables] == [True]
            return u * raw, [u * 7.0]

        return x * raw * other, rule

    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = op(x)
        return tape.gradient(y, [x, raw])

    close(wrap(gradients)(X), [tf.constant([2.0, 3.0]), tf.constant([7.0, 7.0])])
    without = op_custom_gradient(lambda x: (x * raw, lambda u: u * 3.0), name="scale")
    with pytest.raises(TypeError, match=r"scale: .*reads trainable variables[\s\S]*variable 'raw:0'"):
        wrap(lambda x: without(x))(X)


def test_a_tf_variable_as_an_argument():
    variable = tf.Variable([3.0, 4.0])
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 3.0, u * 5.0)))
    with tf.GradientTape() as tape:
        y = op(X, variable)
    close(tape.gradient(y, variable), tf.constant([5.0, 5.0]))


LAYERS = {
    "GRU": lambda: keras.layers.GRU(3, return_sequences=True),
    "BatchNormalization": keras.layers.BatchNormalization,
    "SpectralNormalization": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(3)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_keras_do_not_raise(layer):
    inner, frozen = LAYERS[layer](), keras.layers.Dense(3)
    x = tf.random.stateless_normal((2, 4, 3), (1, 2))

    def call(x):
        return inner(frozen(x), training=True)

    call(x)
    frozen.trainable = False

    @op_custom_gradient
    def op(x):
        return call(x), lambda u, variables: (x * 3.0, [ops.ones(v.shape) * 7.0 for v in variables])

    def gradients(x):
        with tf.GradientTape() as tape:
            y = op(x)
        return tape.gradient(y, [v.value for v in inner.trainable_variables])

    for function in (gradients, tf.function(gradients)):
        close(function(x), [tf.fill(v.shape, 7.0) for v in inner.trainable_variables])
