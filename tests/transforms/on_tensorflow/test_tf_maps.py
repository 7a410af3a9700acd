"""`tf.map_fn`, which keeps rules, and `tf.vectorized_map`, which keeps them only in inner gradients."""

import functools

import pytest
import tensorflow as tf
from cases import CASES, W, X, as_meant, each_of
from keras import ops
from support import close
from tapes import derivatives, tape_gradient, value_and_gradients

from multigrad import jacobian, op_custom_gradient

XS, WS = tf.stack([X, 2.0 * X]), tf.stack([W, -W])
# Without AutoGraph, which converts a LookupError to another error.
in_graph = functools.partial(tf.function, autograph=False)
wraps = pytest.mark.parametrize("wrap", [lambda f: f, in_graph], ids=["eager", "graph"])


def rows(function):
    """Return the expected result of a map."""
    each = [function(x, w) for x, w in zip(XS, WS, strict=True)]
    return tf.nest.map_structure(lambda *parts: tf.stack(parts), *each)


@pytest.mark.parametrize(
    ("wrap", "get"), [(lambda f: f, derivatives), (in_graph, value_and_gradients)], ids=["eager", "graph"]
)
@as_meant(tolerance=1e-3)
def test_map_fn(f, wrap, get):
    def mapped(xs, ws):
        return tf.map_fn(lambda row: f(*row), (xs, ws), fn_output_signature="float32")

    return wrap(lambda: get(mapped, XS, WS))()


def vector_derivatives(function):
    return lambda x, w: [*value_and_gradients(function, x, w)[1], derivatives(function, x, w)[2][0]]


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@each_of()
@wraps
def test_vectorized_map_of_derivatives(case, wrap):
    def inside():
        return tf.vectorized_map(lambda row: vector_derivatives(case.op)(*row), (XS, WS))

    close(wrap(inside)(), rows(vector_derivatives(case.meant)), 1e-3)


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@each_of()
@wraps
def test_a_gradient_of_vectorized_map_raises(case, wrap):
    """TensorFlow copies operations without their gradients, so it silently drops a `tf.custom_gradient`."""

    def map_of(function):
        return lambda xs, ws: tf.vectorized_map(lambda row: function(*row), (xs, ws))

    close(wrap(map_of(case.op))(XS, WS), rows(case.meant), 1e-4)
    with pytest.raises(LookupError, match="the rule was lost"):
        wrap(lambda: value_and_gradients(map_of(case.op), XS, WS))()


def forward(function, w):
    with tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)) as accumulator:
        y = function(w)
    return accumulator.jvp(y)


def closing(function):
    return lambda x, w: op_custom_gradient(lambda w: (function(x, w), lambda u: 7.0 * u))(w)


WITHIN = {"": lambda f: f, "closing over it": closing, "recomputed": tf.recompute_grad}


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("derivative", [tape_gradient, forward])
@pytest.mark.parametrize("name", ["intermediate", "stopped"])
@pytest.mark.parametrize("shape", [W.shape, [None], None], ids=["known", "any size", "any rank"])
def test_a_derivative_with_respect_to_an_unmapped_tensor_raises(name, derivative, within, shape):
    """TensorFlow does not copy the operations that use only this tensor, so that no copy is recorded."""
    op = within(CASES[name].op)

    def of_all(w):
        return derivative(lambda w: tf.vectorized_map(lambda x: op(x, w), XS), w)

    refused = LookupError, NotImplementedError  # `recompute_grad` raises the latter in forward mode
    with pytest.raises(refused, match=r"the rule was lost|recompute_grad"):
        in_graph(of_all, input_signature=[tf.TensorSpec(shape)])(W)


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@wraps
@pytest.mark.parametrize("derivative", [tape_gradient, forward])
@pytest.mark.parametrize("times", [lambda y, x: y, lambda y, x: y * x], ids=["alone", "product"])
def test_a_derivative_raises_if_only_the_rule_uses_the_mapped_tensor(times, derivative, wrap):
    """All elements would use the rule of the first element."""

    def of_all(w):
        def of_each(x):
            op = op_custom_gradient(lambda w: (w * 2.0, lambda u: u * x * 7.0))
            return times(op(w), x)

        return derivative(lambda w: tf.vectorized_map(of_each, XS), w)

    with pytest.raises(Exception, match="the rule was lost"):  # in forward mode not as a LookupError
        wrap(of_all)(W)


@pytest.mark.parametrize(("count", "eager"), [(1, True), (3, True), (100, False)])
def test_a_jacobian_of_few_rows_is_not_traced(count, eager):
    runs = []

    @op_custom_gradient
    def op(x):
        return x * 2.0, lambda u: runs.append(tf.executing_eagerly()) or u * 7.0

    close(jacobian(op)(ops.ones(count)), 7.0 * ops.eye(count))
    assert runs.count(eager) == len(runs) > 0
    assert len(runs) == count or not eager
