"""`tf.function`: with and without XLA, with static and dynamic shapes, with gradients inside and outside."""

import keras
import pytest
import tensorflow as tf
from cases import W, X, all_as_meant, as_meant
from support import close
from tapes import derivatives, some, tape_gradient, value_and_gradients

from multigrad import grad, hessian, jacobian, op_custom_gradient, trace_gradients, value_and_grad
from multigrad.testing import check_gradients

ways = pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])


def in_and_around(options):
    """Return transforms of a function, with a `tf.function` inside and outside of derivatives."""

    def compiled(f):
        return tf.function(f, **options)

    def slope(f):
        return lambda x, w: value_and_gradients(f, x, w)[1][0]

    return {
        "derivatives in a function": lambda f: compiled(lambda x, w: derivatives(f, x, w))(X, W),
        "derivatives around a function": lambda f: derivatives(compiled(f), X, W),
        "a gradient around a gradient in a function": lambda f: value_and_gradients(compiled(slope(f)), X, W),
        # The gradient of the inner function is a function, whose gradient is built in another graph.
        "a gradient around a gradient of a function": lambda f: value_and_gradients(
            compiled(slope(tf.function(f))), X, W
        ),
        "nested functions": lambda f: compiled(
            lambda x, w: value_and_gradients(tf.function(tf.function(f)), x, w)
        )(X, W),
    }


test_graphs = all_as_meant(in_and_around({}))
test_xla = all_as_meant(in_and_around({"jit_compile": True}))


@pytest.mark.parametrize("shape", [[None], None], ids=["dimension", "rank"])
@as_meant(each=some)
def test_input_signatures(f, shape):
    signature = [tf.TensorSpec(shape, "float32")] * 2
    inside = tf.function(lambda x, w: derivatives(f, x, w), input_signature=signature)
    outside = tf.function(f, input_signature=signature)
    arguments = (X, W), (X[:2], W[:2])
    return [(inside(*both), derivatives(outside, *both)) for both in arguments]


@pytest.mark.parametrize("shape", [[None], [None, 2], None], ids=["dimension", "one of two", "rank"])
def test_jacobians_at_unknown_shapes(shape):
    op = op_custom_gradient(lambda x: (x**3, lambda u: 7.0 * u * x**2))
    function = tf.function(jacobian(op), input_signature=[tf.TensorSpec(shape, "float32")])
    x = X[:2] if shape == [None] else tf.stack([X[:2], W[:2], X[1:3]])
    close(function(x), tf.reshape(tf.linalg.diag(tf.reshape(7.0 * x**2, [-1])), [*x.shape, *x.shape]))


@ways
def test_the_function_and_the_rule_are_traced_once(options):
    """The op is defined in a `tf.function`, which is traced once for three calls."""
    runs = []

    @tf.function(**options)
    def gradient(x):
        @op_custom_gradient
        def op(x):
            runs.append("function")
            return x**2, lambda u: runs.append("rule") or u * 7.0 * x

        return tape_gradient(op, x)

    for factor in (1.0, 2.0, 3.0):
        close(gradient(factor * X), 7.0 * factor * X)
    assert runs == ["function", "rule"]


def times_cube_of(w):
    """The false factors are 7 for the argument and 11 for the weight."""
    return op_custom_gradient(
        lambda x: (x * w**3, lambda u, variables: (7.0 * u * w**3, [11.0 * u * x * w**2]))
    )


@pytest.fixture(params=["traced before", "traced here"])
def traced(request):
    """Return a function that makes a `tf.function`, and may trace it with the argument 2.0."""

    def trace(function, **options):
        traced = tf.function(function, autograph=False, **options)
        if request.param == "traced before":
            traced(tf.constant(2.0))
        return lambda *args: traced(*args)

    return trace


@ways
def test_differentiated_variables(traced, options):
    """TensorFlow does not trace the function again, so Keras does not see that it reads the variable."""
    w, x = keras.Variable(3.0), tf.constant(2.0)
    function = traced(times_cube_of(w), **options)
    for value in (3.0, 5.0):
        w.assign(value)
        got, (of_x, (of_w,)) = value_and_grad(function, argnums=0, variables=[w])(x)
        close((got, of_x, of_w), (2.0 * value**3, 7.0 * value**3, 22.0 * value**2))
        # The false rule is differentiated, too.
        close(grad(lambda x: grad(function)(x), variables=[w])(x), [21.0 * value**2])
        close(grad(lambda x: function(x) + w**2, variables=[w])(x), [22.0 * value**2 + 2.0 * value])
    close(function(x), 250.0)


def test_differentiated_variables_to_second_order(traced):
    w = keras.Variable(3.0)
    function = traced(times_cube_of(w))
    inside = tf.function(lambda x: grad(function, variables=[w])(x), autograph=False)
    close(inside(tf.constant(2.0)), [198.0])
    close(jacobian(function, variables=[w])(tf.constant([1.0, 2.0])), [tf.constant([99.0, 198.0])])
    plain = traced(lambda x: x * w**3)
    close(hessian(plain, variables=[w])(tf.constant(2.0)), [[36.0]])


def test_rows_of_a_differentiated_variable(traced):
    layer = keras.layers.Embedding(4, 1)
    layer(tf.constant(2.0))
    function = traced(lambda x: tf.reduce_sum(layer(x)))
    close(
        grad(function, variables=layer.trainable_variables)(tf.constant(2.0)),
        [tf.constant([[0.0], [0], [1], [0]])],
    )


def test_a_rule_that_calls_a_function(traced):
    w, x = keras.Variable(3.0), tf.constant(2.0)
    helper = traced(lambda u: 7.0 * u * w)

    @op_custom_gradient
    def scaled(x):
        return x * w, lambda u, variables: (helper(u), [u * x])

    for value in (3.0, 5.0):
        w.assign(value)
        close(grad(scaled)(x), 7.0 * value)
        close(grad(lambda x: grad(scaled)(x), variables=[w])(x), [7.0])


def test_variables_that_have_another_value_outside(traced):
    w, x = keras.Variable(3.0), tf.constant(2.0)
    function = traced(lambda x: x * w)

    def assigns(x):
        w.assign(w * 2.0)
        return function(x)

    with pytest.raises(
        NotImplementedError, match=r"is read in a tf\.function, and has another value outside"
    ):
        grad(assigns, variables=[w])(x)
    with pytest.raises(NotImplementedError, match=r"is read in a tf\.function"):
        check_gradients(function, x, variables=[w])
    close(function(x), 6.0)


def test_a_differentiated_variable_that_a_function_assigns():
    w = keras.Variable(3.0)
    function = tf.function(lambda x: x * w.assign(w * 2.0), autograph=False)
    with pytest.raises(NotImplementedError, match=r"is assigned in a tf\.function"):
        grad(lambda x: function(x), variables=[w])(tf.constant(2.0))


def test_a_variable_that_a_function_assigns(traced):
    w, count = keras.Variable(3.0), keras.Variable(0.0, trainable=False)

    def counts(x):
        count.assign_add(1.0)
        return x * w

    function, before = traced(counts), float(count)
    close(grad(function, variables=[w])(tf.constant(2.0)), [2.0])
    assert float(count) == before + 1.0


def test_a_scope_around_a_function():
    """Keras stores the value of the scope in the trace, so the gradient would be zero."""
    w = keras.Variable(3.0)
    function = tf.function(lambda x: x * w, autograph=False)
    with (
        keras.StatelessScope([(w, tf.constant(5.0))]),
        pytest.raises(NotImplementedError, match=r"is read in a tf\.function"),
    ):
        grad(lambda x: function(x), variables=[w])(tf.constant(2.0))


def test_compiled_checks_differentiate_variables():
    """The compiled function gets the values of variables as inputs, also if its gradient is wrong there."""
    w = keras.Variable(3.0)

    @op_custom_gradient
    def scaled(x):
        factor = 1.0 if tf.executing_eagerly() else 1.1
        return x * w, lambda u, variables: (u * w, [factor * u * x])

    with pytest.raises(AssertionError, match="the compiled function differs"):
        check_gradients(scaled, 2.0, variables=[w])


def test_a_trace_of_a_function_that_xla_compiles():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x))
    f = tf.function(grad(op), jit_compile=True)
    assert float(f(tf.constant(3.0))) == 21.0
    with trace_gradients() as trace:
        assert tf.config.functions_run_eagerly()
        assert float(f(tf.constant(3.0))) == 21.0
    assert not tf.config.functions_run_eagerly()
    assert [float(step.downstream["x"]) for step in trace.steps] == [21.0]
