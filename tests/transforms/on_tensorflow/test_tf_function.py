"""`tf.function`: with and without XLA, with static and dynamic shapes, with gradients inside and outside."""

import keras
import pytest
import tensorflow as tf
from cases import CASES, each_of
from support import close
from tapes import W, X, derivatives, value_and_gradients

from multigrad import grad, hessian, jacobian, op_custom_gradient, value_and_grad
from multigrad.testing import check_gradients

cases = each_of()
some = pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "two outputs")])
ways = pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "xla"])


@cases
@ways
def test_derivatives_in_a_function(case, options):
    function = tf.function(lambda x, w: derivatives(case.op, x, w), **options)
    close(function(X, W), derivatives(case.meant, X, W), 1e-4)


@cases
@ways
def test_derivatives_around_a_function(case, options):
    close(derivatives(tf.function(case.op, **options), X, W), derivatives(case.meant, X, W), 1e-4)


@some
@ways
def test_a_gradient_around_a_gradient_in_a_function(case, options):
    def slope(function):
        return lambda x, w: value_and_gradients(function, x, w)[1][0]

    got = value_and_gradients(tf.function(slope(case.op), **options), X, W)
    close(got, value_and_gradients(slope(case.meant), X, W), 1e-4)


@cases
@ways
def test_a_gradient_around_a_gradient_function(case, options):
    """The gradient of the inner function is a function, whose gradient is built in another graph."""

    def slope(function):
        return lambda x, w: value_and_gradients(tf.function(function), x, w)[1][0]

    got = value_and_gradients(tf.function(slope(case.op), **options), X, W)
    close(got, value_and_gradients(slope(case.meant), X, W), 1e-4)


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


@some
@ways
def test_nested_functions(case, options):
    inner = tf.function(case.op)
    function = tf.function(lambda x, w: derivatives(tf.function(lambda x, w: inner(x, w)), x, w), **options)
    close(function(X, W), derivatives(case.meant, X, W), 1e-4)


@some
@pytest.mark.parametrize("shape", [[None], None], ids=["dimension", "rank"])
def test_input_signatures(case, shape):
    signature = [tf.TensorSpec(shape, "float32")] * 2
    inside = tf.function(lambda x, w: derivatives(case.op, x, w), input_signature=signature)
    outside = tf.function(case.op, input_signature=signature)
    for count in (3, 2):
        x, w = X[:count], W[:count]
        wanted = derivatives(case.meant, x, w)
        close(inside(x, w), wanted, 1e-4)
        close(derivatives(outside, x, w), wanted, 1e-4)


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

    def define(factor):
        @op_custom_gradient
        def op(x):
            runs.append("function")

            def rule(u):
                runs.append("rule")
                return u * factor * x

            return x**2, rule

        return op

    @tf.function(**options)
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = define(7.0)(x)
        return tape.gradient(y, x)

    for factor in (1.0, 2.0, 3.0):
        close(gradients(factor * X), 7.0 * factor * X)
    assert runs == ["function", "rule"]


def test_a_custom_gradient_of_tensorflow_as_an_argument():
    """TensorFlow 2.21 passes the wrapped function in place of any wrapper.

    When this test fails with a new TensorFlow, the tracing type of our wrappers can be removed.
    """
    op = tf.custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))
    with pytest.raises(TypeError, match="Expected float32, but got"):
        tf.function(lambda f: tf.sin(f(X)), autograph=False)(op)
    close(tf.function(lambda f: tf.sin(f(X)), autograph=False)(lambda x: op(x)), tf.sin(2.0 * X))


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
