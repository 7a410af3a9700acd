"""Memory after a step, of a deleted function, and without a tape, and threads."""

import gc
import weakref

import pytest
import tensorflow as tf
from cases import CASES, W, X
from support import close
from tapes import derivatives, value_and_gradients

from multigrad import op_custom_gradient


class Marker:
    """An object that a rule holds, and whose deletion can be observed."""


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_tensors():
    return sum(issubclass(type(thing), tf.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("step", [value_and_gradients, derivatives])
def test_a_step_leaves_no_tensor(step, no_collector):
    """No tensor is left for the garbage collector."""

    def live_after_steps():
        for case in CASES.values():
            step(case.op, X, W)
        return live_tensors()

    assert live_after_steps() == live_after_steps()


@pytest.mark.parametrize("case", [CASES[name] for name in ("intermediate", "output", "structure")])
def test_the_graph_of_a_deleted_function_is_freed(case):
    """The garbage collector frees it, as it frees graphs of TensorFlow without an op."""
    functions = {
        "inside": tf.function(lambda x, w: value_and_gradients(case.op, x, w)),
        "outside": tf.function(lambda x, w: case.op(x, w)),
        "loop": tf.function(
            lambda x, w: tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, case.op(x, w)), (0, x))[1]
        ),
    }
    value_and_gradients(functions["outside"], X, W)
    value_and_gradients(functions["loop"], X, W)
    graphs = {name: weakref.ref(f.get_concrete_function(X, W).graph) for name, f in functions.items()}
    functions.clear()
    gc.collect()
    assert {name: graph() for name, graph in graphs.items()} == dict.fromkeys(graphs)


def test_objects_of_a_rule_are_freed_with_its_function():
    """Tensors and other objects, and in a compiled graph."""

    def define():
        marker = Marker()

        def f(x):
            def rule(u):
                assert marker is not None
                return u * 7.0

            return x * 1.0, rule

        op = op_custom_gradient(f)
        function = tf.function(
            lambda x: value_and_gradients(lambda x, w: op(x), x, W)[1][0], jit_compile=True
        )
        close(function(X), 7.0 * tf.cos(X))
        return weakref.ref(marker)

    marker = define()
    gc.collect()
    assert marker() is None


def test_nothing_is_recorded_without_a_tape(no_collector):
    """The objects of the rule are freed when the call ends, and on a tape when the tape is freed."""
    markers = []

    @op_custom_gradient
    def op(x):
        marker = Marker()
        markers.append(weakref.ref(marker))

        def rule(u):
            assert marker is not None
            return u * 7.0

        return x * 1.0, rule

    kept = [op(X)]
    with tf.GradientTape() as tape, tape.stop_recording():
        tape.watch(X)
        kept.append(op(X))
    assert [marker() for marker in markers] == [None, None]
    with tf.GradientTape() as tape:
        tape.watch(X)
        kept.append(op(X))
    assert markers[2]() is not None
    del tape
    assert markers[2]() is None
