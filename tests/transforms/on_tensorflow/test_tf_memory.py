"""Memory after a step, of a deleted function, and without a tape, and threads."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf
from cases import CASES, W, X
from support import close
from tapes import derivatives, value_and_gradients

from multigrad import grad, op_custom_gradient


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


def resident():
    """Return the memory of this process in KiB."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the size of the process from Linux")
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_many_steps_do_not_grow_the_process(wrap, no_collector):
    """Each step has 4 MB of residuals. If they were kept, each round would add 40 MB.

    The allocator sometimes keeps memory, but not in every round.
    """
    op, x, w = CASES["intermediate"].op, tf.ones(2**20), tf.ones(2**20)
    step = wrap(lambda: tf.reduce_sum(value_and_gradients(op, x, w)[1][0]))

    def growth_of_a_round():
        before = resident()
        for _ in range(10):
            step()
        return resident() - before

    growth = [growth_of_a_round() for _ in range(6)]
    assert min(growth) < 16 * 1024, growth


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


def test_eight_threads():
    """Each thread computes its gradients and traces its functions, with shared ops."""
    wanted = {name: derivatives(case.meant, X, W) for name, case in CASES.items()}
    shared = {name: tf.function(case.op) for name, case in CASES.items()}
    start = threading.Barrier(8)

    def work(traced):
        start.wait()
        for name, case in CASES.items():
            function = tf.function(case.op) if traced else case.op
            close(derivatives(case.op, X, W), wanted[name], 1e-4)
            close(value_and_gradients(function, X, W), wanted[name][:2], 1e-4)
            close(value_and_gradients(shared[name], X, W), wanted[name][:2], 1e-4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [i < 2 for i in range(8)]))


def test_a_rule_that_computes_a_gradient():
    """A gradient of another op, and of the op itself, with and without an outer tape."""

    @op_custom_gradient
    def op(x, depth):
        def rule(u):
            if depth == 0:
                return u * 7.0, None
            return u * grad(lambda x: tf.reduce_sum(op(x, depth - 1)))(x) * 2.0, None

        return x * 1.0, rule

    for wrap in (lambda f: f, tf.function):
        function = wrap(lambda x: value_and_gradients(lambda x, w: op(x, 3), x, W)[1][0])
        close(function(X), 56.0 * tf.cos(X), 1e-4)
