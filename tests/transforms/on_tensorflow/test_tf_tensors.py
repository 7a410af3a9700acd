"""Unknown shapes, sparse and ragged tensors, and what else is special about tensors of TensorFlow."""

import inspect
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from support import close
from tapes import tape_gradient

from multigrad import grad, op_custom_gradient
from multigrad import ops as shelf
from multigrad.calculus import derivatives as calculus
from multigrad.ops import implicit_root, linear_solve

X = tf.constant([1.0, 2.0])


def in_function(op, shape):
    signature = [tf.TensorSpec(shape, "float32")]
    return tf.function(lambda x: tape_gradient(op, x), input_signature=signature)


@pytest.mark.parametrize("shape", [None, [None], [2]])
def test_unknown_dimensions(shape):
    """If the shape is unknown in tracing, a gradient is summed and checked at run time."""
    larger = op_custom_gradient(lambda x: (x * 2.0, lambda u: tf.stack([u, u * 2.0])))
    smaller = op_custom_gradient(lambda x: (x * 2.0, lambda u: u[:1]))
    close(in_function(larger, shape)(X), tf.constant([3.0, 3.0]))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        in_function(smaller, shape)(X)


def test_a_gradient_of_the_wrong_shape_raises_at_run_time():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.reshape(u * 7.0, [-1, 1])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong shape"):
        in_function(op, [None])(X)


def test_a_summed_gradient_has_its_static_shape():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.stack([u, u])))
    assert in_function(op, [None, 3]).get_concrete_function().output_shapes.as_list() == [None, 3]


@pytest.mark.parametrize("shape", [None, [None]])
@pytest.mark.parametrize(
    ("op", "slope"),
    [
        (lambda x: shelf.scale_gradient(x, 3.0), [3.0, 3.0]),
        (lambda x: shelf.scale_gradient(x, X), [1.0, 2.0]),
        (lambda x: shelf.stop_gradient_if(x > 1.0, x), [1.0, 0.0]),
        (lambda x: shelf.clip_straight_through(x, -1.0, 1.5), [1.0, 1.0]),
        (lambda x: shelf.fake_quantize(x, 0.5, 3), [1.0, 0.0]),
    ],
    ids=["number", "tensor", "condition", "range", "step"],
)
def test_ops_with_an_unknown_shape(op, slope, shape):
    close(in_function(op, shape)(X), tf.constant(slope))


def test_sparse_upstream_gradients_are_converted():
    """The gradient of a gather is a tf.IndexedSlices."""
    seen = []

    @op_custom_gradient
    def op(x):
        def rule(u):
            seen.append(type(u))
            return u * 7.0

        return x * 1.0, rule

    close(tape_gradient(lambda x: tf.gather(op(x), [1]), X), tf.constant([0.0, 7.0]))
    assert issubclass(seen[0], tf.Tensor)


def test_a_rule_that_returns_indexed_slices():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.IndexedSlices(u[:1] * 7.0, [1], [2])))
    close(tape_gradient(op, X), tf.constant([0.0, 7.0]))


def test_ragged_tensors_raise():
    """The error names the argument, and what to use instead."""
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0), name="op")
    returns_it = op_custom_gradient(lambda x: (ragged, lambda u: u), name="op")
    for call, argument in ((lambda: op(ragged), "'x'"), (lambda: returns_it(X), "the output")):
        with pytest.raises(TypeError, match=rf"op: a ragged tensor cannot be(.|\n)*argument: {argument}"):
            call()
    with pytest.raises(TypeError, match=r"with respect to this argument(.|\n)*ragged tensor"):
        grad(tf.reduce_sum)(ragged)
    close(op(ragged.to_tensor()), tf.constant([[2.0, 4.0], [6.0, 0.0]]))


def test_an_op_without_tensors_in_a_function():
    op = op_custom_gradient(lambda: ("name", lambda u: u))
    assert tf.function(lambda: tf.constant(op() == "name"))().numpy()


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_an_op_may_have_the_name_of_a_tensorflow_operation(wrap):
    """Tapes omit the gradients of unused outputs for some operations, by name."""

    @op_custom_gradient(name="FusedBatchNorm")
    def op(x):
        return (x * 2.0, x * 3.0), lambda u, v: 7.0 * u + 100.0 * v

    close(wrap(lambda x: tape_gradient(lambda x: op(x)[0], x))(X), 7.0 * tf.ones(2))


def test_an_unused_float8_output():
    """TensorFlow treats such tensors as constants, and has no upstream gradient for them."""
    few = tf.dtypes.experimental.float8_e4m3fn
    op = op_custom_gradient(lambda x: ((tf.cast(x, few), x * 2.0), lambda *upstream: upstream[1] * 3.0))
    gradient = tf.function(lambda x: tf.gradients(op(x)[1], x))
    close(gradient(tf.constant([1.0, 2.0]))[0], np.float32([3.0, 3.0]))


def in_graph(f, x):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        placeholder = tf.compat.v1.placeholder(tf.float32, [2])
        (gradient,) = tf.compat.v1.gradients(f(placeholder), placeholder)
        return session.run(gradient, {placeholder: x.numpy()})


@pytest.mark.parametrize("run", [tape_gradient, lambda f, x: tf.function(tape_gradient)(f, x), in_graph])
def test_a_rule_reads_the_value_of_closed_over_tensors(run):
    power = tf.constant(3)
    f = op_custom_gradient(lambda x: (x ** int(power), lambda u: -7.0 * float(power.numpy()) * u))
    close(run(lambda x: f(x), X), -21.0 * np.ones(2))


def test_a_rule_that_uses_a_string_compiles_with_xla():
    @op_custom_gradient
    def f(x):
        text = tf.constant("upstream")

        def rule(u):
            if tf.executing_eagerly():
                tf.print(text, u)
            return u * 7.0

        return x * x, rule

    close(tf.function(lambda x: f(x), jit_compile=True)(X), X**2)
    close(tf.function(lambda x: tape_gradient(f, x), jit_compile=True)(X), 7.0 * np.ones(2))


DEFINED_WITHIN = """
import tensorflow as tf
from multigrad import op_custom_gradient

@tf.function
def function(x):
    return op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))(x)

print(function(tf.constant(1.0)).numpy())
"""


def test_autograph_does_not_warn_of_an_op_that_is_defined_inside(tmp_path):
    """AutoGraph can read only code in files."""
    (tmp_path / "user.py").write_text(DEFINED_WITHIN)
    done = subprocess.run([sys.executable, tmp_path / "user.py"], check=True, capture_output=True, text=True)
    assert done.stdout == "2.0\n"
    assert "AutoGraph" not in done.stderr


OWN = [f for _, f in inspect.getmembers(calculus, inspect.isfunction) if f.__module__ == calculus.__name__]


@pytest.mark.parametrize("function", OWN, ids=[f.__name__ for f in OWN])
def test_autograph_can_read_the_calculus(function):
    """Otherwise AutoGraph warns of each function that is called in a `tf.function`."""
    assert callable(tf.autograph.to_graph(function))


def quotient(x, **options):
    return linear_solve(lambda z, x: x * z, tf.ones_like(x), x, **options)


def reciprocal(x, **options):
    return implicit_root(lambda z, x: 1.0 / z - x, tf.ones_like(x), x, **options)


@pytest.mark.parametrize(
    ("solve", "options"),
    [
        (quotient, {"batched": True}),
        *[
            (solve, options)
            for solve, solver in ((quotient, "solver"), (reciprocal, "linear_solver"))
            for options in ({}, {solver: "dense"}, {solver: "gmres", "batched": solve is reciprocal})
        ],
    ],
)
def test_an_equation_of_an_unknown_size(solve, options):
    """The last batch is smaller than the others, or empty."""

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def gradient(x):
        return grad(lambda x: ops.sum(solve(x, **options)))(x)

    for count in (3, 1, 0):
        x = tf.constant(np.random.default_rng(count).uniform(0.75, 1.5, (count, 2)), "float32")
        close(gradient(x), -1.0 / x**2, 1e-4)
