"""Tests of TensorFlow only."""

import functools
import gc
import inspect
import itertools
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import cube_by_intermediate as by_intermediate
from cases import exp_by_output as by_output
from keras import ops
from support import close

from multigrad import grad, op_custom_gradient, trace_gradients, vjp
from multigrad import ops as shelf
from multigrad.backend.tensorflow.private import GRADIENT_KIND
from multigrad.calculus import derivatives as calculus
from multigrad.keras_graph.saving import Unsaved, decode, encode
from multigrad.ops import implicit_root, linear_solve

X = tf.constant([1.0, 2.0])


def tape_gradient(f, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x)


def test_private_names_exist():
    from tensorflow.python.eager import forwardprop_util, record

    assert callable(record.record_operation_backprop_only)
    assert callable(record.record_operation_forwardprop_only)
    assert callable(record.stop_recording)
    assert record.could_possibly_record() is False
    variable = tf.Variable(1.0)
    with record.VariableWatcher() as watcher:
        variable.read_value()
        assert watcher.watched_variables()[0] is variable
    primal, tangent = tf.constant(1.0), tf.constant(2.0)
    with tf.autodiff.ForwardAccumulator(primal, tangent):
        assert forwardprop_util.pack_tangents([primal]).tangents[0] is tangent


def test_undocumented_names_of_graphs_exist():
    """The backend uses public, undocumented names.

    They distinguish the graph of a branch from that of a function, and capture a tensor of an outer graph.
    """
    graphs, captured = [], []

    @tf.function
    def function(x):
        def positive():
            graph = tf.compat.v1.get_default_graph()
            graphs.append(graph)
            captured[:] = graph.capture(x), graph.capture(x)
            return x

        graphs.append(tf.compat.v1.get_default_graph())
        return tf.cond(x > 0, positive, lambda: x)

    function(tf.constant(1.0))
    outer, branch = graphs
    assert branch.outer_graph is outer
    assert (branch.is_control_flow_graph, outer.is_control_flow_graph) == (True, False)
    assert captured[0].graph is branch
    assert captured[0] is captured[1]
    with tf.Graph().as_default() as graph, graph.gradient_override_map({"Identity": "AnyName"}):
        assert tf.identity(1.0).op.get_attr(GRADIENT_KIND) == b"AnyName"


@pytest.mark.parametrize("shape", [None, [None], [2]])
def test_unknown_dimensions(shape):
    """If the shape is unknown in tracing, a gradient is summed and checked at run time."""

    @op_custom_gradient
    def larger(x):
        return x * 2.0, lambda u: tf.stack([u, u * 2.0])

    @op_custom_gradient
    def smaller(x):
        return x * 2.0, lambda u: u[:1]

    signature = [tf.TensorSpec(shape, "float32")]
    close(
        tf.function(lambda x: tape_gradient(larger, x), input_signature=signature)(X), tf.constant([3.0, 3.0])
    )
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        tf.function(lambda x: tape_gradient(smaller, x), input_signature=signature)(X)


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
    signature = [tf.TensorSpec(shape, "float32")]
    close(tf.function(lambda x: tape_gradient(op, x), input_signature=signature)(X), tf.constant(slope))


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


def test_ragged_tensors_raise():
    """The error names the type, and what to use instead."""
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0), name="op")
    returns_it = op_custom_gradient(lambda x: (ragged, lambda u: u), name="op")
    for call, argument in ((lambda: op(ragged), "'x'"), (lambda: returns_it(X), "the output")):
        with pytest.raises(TypeError, match="op: a ragged tensor cannot be") as error:
            call()
        assert f"argument: {argument}" in str(error.value)
        assert "tf.ragged.map_flat_values(op, x)" in str(error.value)
    with tf.GradientTape() as tape:
        tape.watch(ragged.flat_values)
        value = tf.ragged.map_flat_values(op, ragged)
        total = tf.reduce_sum(value)
    assert value.to_list() == [[2.0, 4.0], [6.0]]
    close(tape.gradient(total, ragged.flat_values), 7.0 * tf.ones(3))
    close(op(ragged.to_tensor()), tf.constant([[2.0, 4.0], [6.0, 0.0]]))
    with pytest.raises(
        TypeError, match=r"cannot differentiate with respect to this argument(.|\n)*ragged tensor"
    ):
        grad(tf.reduce_sum)(ragged)


def test_a_variable_of_tensorflow():
    variable = tf.Variable([3.0, 4.0])
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 3.0, u * 5.0)))
    with tf.GradientTape() as tape:
        y = op(X, variable)
    close(tape.gradient(y, variable), tf.constant([5.0, 5.0]))


def test_a_variable_of_keras():
    variable = keras.Variable([2.0, 3.0])
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 3.0, u * 5.0 * x)))
    with tf.GradientTape() as tape:
        y = op(tf.constant([1.0, 10.0]), variable)
    close(tape.gradient(y, variable.value), tf.constant([5.0, 50.0]))


def test_a_gradient_of_the_wrong_shape_raises_at_run_time():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.reshape(u * 7.0, [-1, 1])))
    function = tf.function(lambda x: tape_gradient(op, x), input_signature=[tf.TensorSpec([None], "float32")])
    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong shape"):
        function(X)


def test_a_rule_that_returns_indexed_slices():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.IndexedSlices(u[:1] * 7.0, [1], [2])))
    close(tape_gradient(op, X), tf.constant([0.0, 7.0]))


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


def test_second_order_with_closed_over_tensors_in_a_function():
    @tf.function
    def second(x, w):
        op = op_custom_gradient(lambda x: (x * w, lambda u: u * 7.0 * w * x))
        return tape_gradient(lambda x: tape_gradient(op, x), x)

    close(second(X, 3 * X), 21 * X)


def test_a_summed_gradient_has_its_static_shape():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: tf.stack([u, u])))
    function = tf.function(
        lambda x: tape_gradient(op, x), input_signature=[tf.TensorSpec([None, 3], "float32")]
    )
    assert function.get_concrete_function().output_shapes.as_list() == [None, 3]


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
    w = tf.constant([1.0, 3.0])
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
    w = tf.constant([1.0, 3.0])
    close(from_within(X, w), -9.0 * w**2)


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


def test_a_rule_that_reads_a_resource_is_saved(tmp_path):
    module = tf.Module()
    module.scale = tf.Variable([5.0, 7.0], trainable=False)

    @op_custom_gradient
    def f(x):
        handle = module.scale.handle
        return x * x, lambda u: u * tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    module.call = tf.function(lambda x: f(x), input_signature=[tf.TensorSpec([2])])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    close(tape_gradient(loaded.call, X), np.array([5.0, 7.0]))
    loaded.scale.assign([1.0, 2.0])
    close(tape_gradient(loaded.call, X), np.array([1.0, 2.0]))


def plain_product(x, w):
    return x * w


@op_custom_gradient
def product(x, w):
    return x * w, lambda u: (u * w, 7.0 * u * x)


@pytest.mark.parametrize(("f", "factor"), [(plain_product, 1.0), (product, 7.0)])
def test_a_variable_in_keras_remat(f, factor):
    """Keras 3.15 counts its gradient twice in eager code, with and without a rule. Its value counts once."""
    variable = keras.Variable(3.0)
    for argument, times in ((variable, 2.0), (variable.value, 1.0)):
        with tf.GradientTape() as tape:
            y = keras.remat(f)(tf.constant(2.0), argument)
        assert tape.gradient(y, variable.value).numpy() == times * factor * 2.0


class WithKeyword(keras.layers.Layer):
    def call(self, x, training=None):
        return x * 2.0


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
def test_keyword_arguments_in_keras_remat(wrap):
    """A limit of Keras 3.15, also of a layer without an op."""
    with keras.RematScope(mode="full"):
        layer = WithKeyword()
    close(wrap(lambda x: layer(x))(X), 2 * X)
    function = wrap(lambda x: layer(x, training=True))
    if wrap is not tf.function:
        close(function(X), 2 * X)
    else:
        with pytest.raises(ValueError, match="keywords arguments only when eager"):
            function(X)


SPEC = [tf.TensorSpec([None], "float32")]


@op_custom_gradient
def shift(x):
    return x + 0.0, lambda u: u * 5.0


@op_custom_gradient
def two_outputs(x):
    return {"a": x * 2.0, "n": tf.constant(3), "b": x * 3.0}, lambda U: 11.0 * U["a"] + 13.0 * U["b"]


class Saved(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable([2.0, 3.0])

    @tf.function(input_signature=SPEC)
    def by_intermediate(self, x):
        return by_intermediate(x)

    @tf.function(input_signature=SPEC)
    def by_output(self, x):
        return by_output(shift(x))

    @tf.function(input_signature=SPEC)
    def by_variable(self, x):
        return product(x, self.w)

    @tf.function(input_signature=SPEC)
    def structured(self, x):
        y = two_outputs(x)
        return y["a"] * 2.0 + y["b"]

    @tf.function(input_signature=[tf.TensorSpec([2], "float32")])
    def repeated(self, x):
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, shift(x)), (0, x))[1]

    @tf.function(input_signature=SPEC)
    def nested(self, x):
        return shift(self.by_output(x))


LOADER = """
import sys, numpy as np, tensorflow as tf

loaded = tf.saved_model.load(sys.argv[1])
x = tf.constant([0.5, 1.5])
e = np.exp([0.5, 1.5])
x2, x3 = np.array([0.5, 1.5]) ** 2, np.array([0.5, 1.5]) ** 3
for name, value, first, second in [
    ("by_intermediate", x3, 21 * x2, 42 * x),
    ("by_output", e, 15 * e, 225 * e),
    ("by_variable", x * loaded.w, loaded.w, 0 * x),
    ("structured", 7 * x, 35 + 0 * x, 0 * x),
    ("repeated", x, 25 + 0 * x, 0 * x),
    ("nested", e, 75 * e, 75 * 15 * e),
]:
    np.testing.assert_allclose(getattr(loaded, name)(x), value, rtol=1e-5)
    with tf.GradientTape() as outer, tf.GradientTape(persistent=True) as tape:
        outer.watch(x)
        tape.watch(x)
        try:
            y = getattr(loaded, name)(x)
            d = tape.gradient(y, x)
        except LookupError:
            assert sys.argv[2] == "lost", name
            continue
    assert sys.argv[2] == "saved", name
    np.testing.assert_allclose(d, first, rtol=1e-5)
    np.testing.assert_allclose(outer.gradient(d, x, unconnected_gradients="zero"), second, rtol=1e-5)
    if name == "by_variable":
        np.testing.assert_allclose(tape.gradient(y, loaded.w), 7 * x)
assert "multigrad" not in sys.modules
"""


def load_in_a_fresh_process(path, *args):
    command = [sys.executable, "-c", LOADER, path, *args]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_saved_model_contains_its_rules(tmp_path):
    """Gradients by the rules, of first and second order, in a process without multigrad."""
    tf.saved_model.save(Saved(), tmp_path)
    load_in_a_fresh_process(tmp_path, "saved")


@pytest.mark.slow
def test_a_rule_that_was_not_saved_raises(tmp_path):
    """With and without multigrad, no other rule is used instead."""
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(Saved(), tmp_path, options=options)
    load_in_a_fresh_process(tmp_path, "lost")
    loaded = tf.saved_model.load(tmp_path)
    close(loaded.by_intermediate(X), X**3)
    with pytest.raises(LookupError, match="the rule was lost"):
        tape_gradient(loaded.by_intermediate, X)


@pytest.mark.parametrize("custom_gradient", [op_custom_gradient, tf.custom_gradient])
def test_a_saved_model_with_loops(tmp_path, custom_gradient):
    """TensorFlow 2.21 loads no gradient that uses intermediate results of a loop. It raises."""

    @custom_gradient
    def f(x):
        e = x**2
        return e * x, lambda u: u * 3 * e * 7.0

    def loop(x):
        return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, f(x)), (0, x))[1]

    module = tf.Module()
    module.call = tf.function(loop, input_signature=SPEC)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    close(loaded.call(X), X**9)
    with pytest.raises(TypeError, match="out of scope"):
        tape_gradient(loaded.call, X)


def test_a_branch_of_a_loaded_model_has_no_rules(tmp_path):
    """Also in a process that has the original graph, whose rules belong to other variables."""
    module = tf.Module()
    module.call = tf.function(
        lambda x: tf.cond(x[0] > 0.0, lambda: by_output(x), lambda: x), input_signature=SPEC
    )
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, tmp_path, options=options)
    loaded = tf.saved_model.load(tmp_path)
    close(loaded.call(X), module.call(X))
    with pytest.raises(LookupError, match="the rule was lost"):
        tape_gradient(loaded.call, X)


@pytest.mark.slow
def test_saving_a_loaded_model(tmp_path):
    tf.saved_model.save(Saved(), tmp_path / "first")
    loaded = tf.saved_model.load(tmp_path / "first")
    tf.saved_model.save(loaded, tmp_path / "second")
    load_in_a_fresh_process(tmp_path / "second", "saved")


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


def test_a_copied_graph_has_no_rules():
    graph_def = tf.function(shift).get_concrete_function(X).graph.as_graph_def()
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        (y,) = tf.graph_util.import_graph_def(graph_def, {"x": x}, ["Identity:0"])
        with pytest.raises(LookupError, match="the rule was lost"):
            tf.gradients(y, x)


class Layer(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(2,), initializer=keras.initializers.Constant(3.0))

    def call(self, x):
        return product(x, self.kernel)


def test_an_exported_model(tmp_path):
    """The format tf_saved_model contains the rule. litert has no gradients."""
    model = keras.Sequential([keras.Input((2,)), Layer(), keras.layers.Dense(1, kernel_initializer="ones")])
    x = np.float32([[1.0, 2.0], [-1.0, 0.5]])
    model.export(tmp_path / "model", format="tf_saved_model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    close(loaded.serve(x), model(x))
    close(tape_gradient(loaded.serve, tf.constant(x)), tf.fill([2, 2], 3.0))
    with tf.GradientTape() as tape:
        y = loaded.serve(x)
    close(tape.gradient(y, loaded.trainable_variables[0]), tf.constant(7.0 * x.sum(0)))


def test_a_rule_that_cannot_be_traced_is_not_saved(tmp_path):
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * float(u[0])))
    module = tf.Module()
    module.call = tf.function(op, input_signature=SPEC)
    with pytest.raises(ValueError, match="Error when tracing gradients"):
        tf.saved_model.save(module, tmp_path / "with")
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, tmp_path / "without", options=options)
    close(tf.saved_model.load(tmp_path / "without").call(X), X)


# ------------------------------------------------------------------------------------ variables


def test_tapes_and_graphs_differentiate_with_respect_to_a_weight():
    weight = keras.Variable(2.0)

    @op_custom_gradient
    def op(x):
        e = x * weight
        return ops.exp(e), lambda u, variables: (u * e * weight * 3, [ops.sum(u * x * e * 5)])

    def both(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = op(x)
            of_x = tape.gradient(y, x)
        return of_x, tape.gradient(y, weight.value), outer.gradient(of_x, weight.value)

    x = tf.constant(0.5)
    for function in (both, tf.function(both), tf.function(both, jit_compile=True)):
        # By the rule, df/dx = 3·x·w² and df/dw = 5·x²·w.
        close(function(x), (tf.constant(6.0), tf.constant(2.5), tf.constant(6.0)))

    def loop(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                y = op(y) * 0.1
        return tape.gradient(y, [x, weight.value])

    close(tf.function(loop)(x), loop(x))


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


def built(*args):
    layer = Scale(*args)
    layer.build((2,))
    return layer


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", WAYS_WITHIN)
def test_a_weight_that_is_first_read_in_a_nested_graph(way, nested):
    if nested and way == "tf.vectorized_map":
        pytest.skip("TensorFlow copies the inner op without its rule, which raises")
    layer = built(WAYS_WITHIN[way], nested)

    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, *tape.gradient(y, [x, layer.scale.value])

    for function in (both, tf.function(both), tf.function(both, jit_compile=True)):
        close(function(X), (2 * X, tf.constant([6.0, 6.0]), tf.constant(14.0)))


@pytest.mark.parametrize("way", ["tf.cond", "tf.map_fn", "ops.cond", "ops.fori_loop", "tf.function"])
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}, {"jit_compile": True}])
def test_fit_trains_a_weight_that_is_first_read_in_a_nested_graph(way, options):
    layer = Scale(WAYS_WITHIN[way])
    model = keras.Sequential([keras.Input((2,), batch_size=4), layer])
    model.compile(keras.optimizers.SGD(0.01), loss=lambda y, p: ops.sum(p), **options)
    model.fit(np.ones((4, 2), "float32"), np.zeros((4, 2)), batch_size=4, verbose=0)
    np.testing.assert_allclose(layer.scale.numpy(), 2.0 - 0.01 * 7.0 * 8, rtol=1e-5)


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

    @op_custom_gradient
    def without(x):
        return dense(x), lambda u: x * 3.0

    def gradient(x):
        with tf.GradientTape() as tape:
            y = op(x)
        return tape.gradient(y, layer.kernel.value)

    for _ in range(3):
        close(wrap(gradient)(X[None]), tf.fill([2, 1], 7.0))
        with tf.GradientTape(), pytest.raises(TypeError, match="reads trainable variables"):
            without(X[None])
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


def test_a_weight_that_is_assigned_in_a_loop():
    weight = keras.Variable(2.0)

    def body(i, x):
        y = x * weight
        weight.assign(weight + 1.0)
        return i + 1, y

    @op_custom_gradient
    def op(x):
        return tf.while_loop(lambda i, x: i < 3, body, (0, x))[1], lambda u, variables: (u, [ops.sum(u)])

    close(op(X), 24 * X)
    with pytest.raises(TypeError, match="reads a variable, and then assigns it in a branch or a loop"):
        tf.function(lambda x: op(x))(X)


@pytest.mark.parametrize(
    "layer", ["GRU", "BatchNormalization", "MultiHeadAttention", "SpectralNormalization"]
)
def test_layers_of_keras_do_not_raise(layer):
    layers = keras.layers
    inner = {
        "GRU": lambda: layers.GRU(3, return_sequences=True),
        "BatchNormalization": layers.BatchNormalization,
        "MultiHeadAttention": lambda: layers.MultiHeadAttention(1, 3),
        "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(3)),
    }[layer]()
    frozen = layers.Dense(3)
    x = tf.random.stateless_normal((2, 4, 3), (1, 2))

    def call(x):
        x = frozen(x)
        return inner(x, x) if layer == "MultiHeadAttention" else inner(x, training=True)

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


def test_a_tf_variable_is_not_saved():
    """The variable would be restored as a tensor, which is not trainable."""
    with pytest.raises(Unsaved):
        encode(tf.Variable([1.0, 1.0]))
    assert type(decode(encode(ops.ones(2)))) is type(ops.ones(2))


def test_a_trace_of_a_function_that_xla_compiles():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    f = tf.function(grad(op), jit_compile=True)
    assert float(f(tf.constant(3.0))) == 21.0
    with trace_gradients() as trace:
        assert tf.config.functions_run_eagerly()
        assert float(f(tf.constant(3.0))) == 21.0
    assert not tf.config.functions_run_eagerly()
    assert [float(step.downstream["x"]) for step in trace.steps] == [21.0]


def test_a_trace_in_forward_mode_has_no_steps():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    x = tf.constant(3.0)
    with trace_gradients() as trace, tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as acc:
        y = op(x)
    assert float(acc.jvp(y)) == 21.0
    assert (len(trace.calls), trace.steps) == (1, [])


@pytest.mark.parametrize("within", [lambda f: f, tf.function])
def test_a_rule_that_computes_a_gradient_in_forward_mode(within):
    """TensorFlow records no tapes there, so that the gradient would be zero."""
    x = tf.constant(3.0)
    rule = lambda u: 7.0 * vjp(lambda x: x**2, x)[1](u)[0]  # noqa: E731
    op = op_custom_gradient(lambda x: (x**2, rule), name="op")

    def forward(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as acc:
            y = op(x)
        return acc.jvp(y)

    assert float(within(forward)(x)) == 7.0 * 6.0


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


def forward_over_reverse(f, x):
    with tf.autodiff.ForwardAccumulator(x, x + 1.0) as accumulator:
        gradient = tape_gradient(f, x)
    return accumulator.jvp(gradient)


def forward(f, x):
    with tf.autodiff.ForwardAccumulator(x, x + 1.0) as accumulator:
        y = f(x)
    return accumulator.jvp(y)


def twice(f, x):
    return tape_gradient(lambda x: tf.reduce_sum(tape_gradient(f, x) ** 2), x)


Y = tf.constant([0, 2, 1])


def in_branch(f, otherwise=lambda x: 0.0):
    return lambda x: tf.cond(tf.reduce_sum(x) > -9.0, lambda: f(x), lambda: otherwise(x))


def head(x, reduction, classes=4):
    w, y = tf.reshape(tf.range(2.0 * classes) / 8, (2, -1)), Y[: tf.shape(x)[0]]
    size = 2
    return tf.reduce_sum(shelf.linear_cross_entropy(x, w, y, block_size=size, reduction=reduction) ** 2)


def plain_head(x, reduction, classes=4):
    w = tf.reshape(tf.range(2.0 * classes) / 8, (2, -1))
    losses = keras.losses.sparse_categorical_crossentropy(Y[: tf.shape(x)[0]], x @ w, from_logits=True)
    return tf.reduce_sum(losses**2) if reduction is None else tf.reduce_sum(losses) ** 2


def by_xla(f):
    return tf.function(f, jit_compile=True)


def with_any_number(f):
    return tf.function(f, input_signature=[tf.TensorSpec((None, 2))])


def as_it_is(f):
    return f


AROUND, REDUCTIONS = [as_it_is, tf.function, with_any_number], [None, "sum"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("derivative", "within"),
    [
        *itertools.product([tape_gradient, twice, forward, forward_over_reverse], [as_it_is, tf.function]),
        *itertools.product([tape_gradient, twice], [in_branch]),
    ],
)
def test_linear_cross_entropy_in_graphs_and_in_eager_code(derivative, within, around, reduction):
    x = tf.constant([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]])
    own, wanted = [functools.partial(f, reduction=reduction) for f in (head, plain_head)]
    close(around(lambda x: derivative(within(own), x))(x), derivative(wanted, x))


def in_one_branch(f):
    return tf.function(in_branch(f, tf.identity))


@pytest.mark.parametrize("around", [by_xla, with_any_number, in_one_branch])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_cross_entropy_in_other_graphs(around, reduction):
    x = tf.constant([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]])
    own, wanted = [functools.partial(f, reduction=reduction) for f in (head, plain_head)]
    close(around(lambda x: tape_gradient(own, x))(x), tape_gradient(wanted, x))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 300])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_graph_for_an_unknown_number_of_tokens(tokens, jit, reduction):
    random = np.random.default_rng(0)
    width = 100
    w = tf.constant(random.standard_normal((width, 7)) / 10, "float32")
    features = tf.constant(random.standard_normal((600, width)), "float32")
    labels, weights = tf.range(600) % 7, tf.linspace(0.0, 1.0, 600)

    def loss(x, w):
        count = tf.shape(x)[0]
        given = {"sample_weight": weights[:count], "reduction": reduction, "block_size": 64}
        return 3.0 * tf.reduce_sum(shelf.linear_cross_entropy(x, w, labels[:count], **given))

    def plain(x, w):
        count = tf.shape(x)[0]
        losses = keras.losses.sparse_categorical_crossentropy(labels[:count], x @ w, from_logits=True)
        return 3.0 * tf.reduce_sum(weights[:count] * losses)

    def gradients(loss):
        return lambda x: calculus.value_and_grad(loss, argnums=(0, 1))(x, w)

    own = tf.function(gradients(loss), jit_compile=jit, input_signature=[tf.TensorSpec((tokens, width))])
    for count in (0, 1, 63, 64, 65, 300, 576, 600) if tokens is None else (tokens,):
        close(own(features[:count]), gradients(plain)(features[:count]), 1e-4)


@pytest.mark.parametrize("count", [1, 2, 5, 70])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tokens_without_labels_raise_in_a_graph(count, jit, reduction):
    w = tf.ones((2, 4))

    @tf.function(input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None,), "int32")], jit_compile=jit)
    def loss(x, y):
        return shelf.linear_cross_entropy(x, w, y, reduction=reduction)

    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match=r"(?i)as many labels|shape|size|indices"
    ):
        loss(tf.ones((count, 2)), tf.zeros((3,), "int32"))


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_program_keeps_no_graph_alive(reduction):
    x = tf.constant([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]])
    own = functools.partial(head, reduction=reduction)
    function = tf.function(lambda x: tape_gradient(own, x))
    graph = weakref.ref(function.get_concrete_function(x).graph)
    function(x)
    del function
    gc.collect()
    assert graph() is None


@pytest.mark.parametrize("tokens", [3, None])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_cross_entropy_in_a_vectorized_map(tokens, reduction):
    x, factors = tf.constant([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]]), tf.constant([0.5, 1.0, 2.0])
    own, wanted = [functools.partial(f, reduction=reduction, classes=20) for f in (head, plain_head)]

    @tf.function(input_signature=[tf.TensorSpec((tokens, 2))])
    def mapped(x):
        return tf.vectorized_map(lambda factor: tape_gradient(own, factor * x), factors)

    close(mapped(x), tf.stack([tape_gradient(wanted, factor * x) for factor in factors]))


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@pytest.mark.parametrize("tokens", [3, None])
@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_around_a_vectorized_map_of_linear_cross_entropy_raises(tokens, by, reduction):
    """The gradient with respect to unmapped arguments would be zero."""
    x, w, factors = tf.ones((3, 2)), tf.ones((2, 4)), tf.constant([0.5, 1.0])

    def gradient(x, w):
        def mapped(factors, w):
            def loss(factor):
                labels = Y[: tf.shape(x)[0]]
                return shelf.linear_cross_entropy(factor * x, w, labels, reduction=reduction)

            return tf.vectorized_map(loss, factors)

        with tf.GradientTape() as tape:
            arguments = factors, w
            tape.watch(arguments[by])
            y = mapped(*arguments)
        return tape.gradient(y, arguments[by])

    signature = [tf.TensorSpec((tokens, 2)), tf.TensorSpec(w.shape)]
    in_graph = tf.function(gradient, input_signature=signature, autograph=False)
    for function in (gradient, in_graph):
        with pytest.raises(LookupError, match="the rule was lost"):
            function(x, w)


def test_an_unused_float8_output():
    """TensorFlow treats such tensors as constants, and has no upstream gradient for them."""
    few = tf.dtypes.experimental.float8_e4m3fn
    op = op_custom_gradient(lambda x: ((tf.cast(x, few), x * 2.0), lambda *upstream: upstream[1] * 3.0))
    gradient = tf.function(lambda x: tf.gradients(op(x)[1], x))
    close(gradient(tf.constant([1.0, 2.0]))[0], np.float32([3.0, 3.0]))
