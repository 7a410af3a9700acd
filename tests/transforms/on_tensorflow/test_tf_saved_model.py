"""Saved models and copied graphs: a rule is saved, or a gradient raises."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from cases import cube_by_intermediate as by_intermediate
from cases import exp_by_output as by_output
from keras import ops
from support import close
from tapes import tape_gradient

from multigrad import op_custom_gradient
from multigrad.keras_graph.saving import Unsaved, decode, encode

X = tf.constant([1.0, 2.0])
WITHOUT_RULES = tf.saved_model.SaveOptions(experimental_custom_gradients=False)


@op_custom_gradient
def product(x, w):
    return x * w, lambda u: (u * w, 7.0 * u * x)


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
    tf.saved_model.save(Saved(), tmp_path, options=WITHOUT_RULES)
    load_in_a_fresh_process(tmp_path, "lost")
    loaded = tf.saved_model.load(tmp_path)
    close(loaded.by_intermediate(X), X**3)
    with pytest.raises(LookupError, match="the rule was lost"):
        tape_gradient(loaded.by_intermediate, X)


def test_a_saved_model_with_loops(tmp_path):
    """TensorFlow 2.21 loads no gradient that uses intermediate results of a loop. It raises."""
    module = tf.Module()
    module.call = tf.function(
        lambda x: tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, by_intermediate(x)), (0, x))[1],
        input_signature=SPEC,
    )
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
    tf.saved_model.save(module, tmp_path, options=WITHOUT_RULES)
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


def test_a_rule_that_cannot_be_traced_is_not_saved(tmp_path):
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * float(u[0])))
    module = tf.Module()
    module.call = tf.function(op, input_signature=SPEC)
    with pytest.raises(ValueError, match="Error when tracing gradients"):
        tf.saved_model.save(module, tmp_path / "with")
    tf.saved_model.save(module, tmp_path / "without", options=WITHOUT_RULES)
    close(tf.saved_model.load(tmp_path / "without").call(X), X)


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


def test_a_copied_graph_has_no_rules():
    graph_def = tf.function(shift).get_concrete_function(X).graph.as_graph_def()
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        (y,) = tf.graph_util.import_graph_def(graph_def, {"x": x}, ["Identity:0"])
        with pytest.raises(LookupError, match="the rule was lost"):
            tf.gradients(y, x)


def test_a_tf_variable_is_not_saved():
    """The variable would be restored as a tensor, which is not trainable."""
    with pytest.raises(Unsaved):
        encode(tf.Variable([1.0, 1.0]))
    assert type(decode(encode(ops.ones(2)))) is type(ops.ones(2))
