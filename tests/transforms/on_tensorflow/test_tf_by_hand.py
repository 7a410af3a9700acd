"""An op is what one writes by hand with `tf.custom_gradient`: the graph that runs, and what a tape keeps."""

import collections
import gc

import pytest
import tensorflow as tf
from by_hand import DOUBTFUL, PAIRS, total

from multigrad import op_custom_gradient

pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def traced(op, pair):
    """The graph of the value and the gradients, and what is fetched from it."""

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = total(op)(*tensors)
        return value, tape.gradient(value, tensors)

    return tf.function(step, autograph=False).get_concrete_function(*pair.arguments())


def kinds(graph):
    """How many operations a graph has of each type, but for constants, of which some are one to TensorFlow
    where they have one value."""
    return collections.Counter(node.op for node in graph.node if node.op != "Const")


def as_run(concrete, arguments):
    """The graph that TensorFlow runs, after its optimiser (Grappler)."""
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    feeds = {place.name: value.numpy() for place, value in zip(concrete.inputs, arguments, strict=True)}
    with tf.compat.v1.Session(graph=concrete.graph) as session:
        session.run(concrete.outputs, feeds, options=options, run_metadata=metadata)
    (graph,) = metadata.partition_graphs
    return graph


@pairs
def test_the_graph_that_runs(pair):
    arguments = pair.arguments()
    ours, by_hand = (kinds(as_run(traced(op, pair), arguments)) for op in (pair.op, pair.by_hand))
    assert ours == by_hand


@pairs
def test_the_graph_as_traced(pair):
    """It has a guard for each input, behind all of them, in case its gradient gets lost; none of them runs.

    What is written by hand has an Identity of each output.
    """
    arguments = pair.arguments()
    ours, by_hand = (kinds(traced(op, pair).graph.as_graph_def()) for op in (pair.op, pair.by_hand))
    assert ours - by_hand == {"PreventGradient": len(arguments), "IdentityN": 1}
    assert by_hand - ours == {"Identity": len(tf.nest.flatten(pair.op(*arguments)))}


def kept(op, arguments):
    """The shapes of what is alive after a call because its tape is, but for single numbers."""

    def call():
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            return tape, op(*arguments)

    call()  # traces, where there is something to trace
    gc.collect()
    gc.disable()
    try:
        before = live()
        tape, output = call()
        own = {id(tensor) for tensor in tf.nest.flatten(output)}
        new = [tensor for place, tensor in live().items() if place not in before and place not in own]
        assert tape is not None
        return collections.Counter(tuple(tensor.shape) for tensor in new if tensor.shape.rank)
    finally:
        gc.enable()


def live():
    return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), tf.Tensor)}


@pairs
def test_what_a_tape_keeps(pair):
    """No more than by hand.

    That is more than the residuals, where these are computed in several steps: a second derivative goes back
    through them, and the tape keeps for it what they need.
    """
    ours, by_hand = (kept(op, pair.arguments()) for op in (pair.op, pair.by_hand))
    assert ours <= by_hand


in_one_step = {name: pair for name, pair in PAIRS.items() if name != "narrow"}


@pytest.mark.parametrize("pair", in_one_step.values(), ids=in_one_step)
def test_a_tape_keeps_the_residuals_alone(pair):
    """An input or an output is the caller's."""
    computed = pair.saved if pair.again else ()
    assert kept(pair.op, pair.arguments()) == collections.Counter(computed)


@pairs
def test_what_a_tape_keeps_of_a_graph(pair):
    """Of a function that is traced: as by hand, and under a second name, in the same memory, each input and
    each residual. So what a rule closes over and has no use for is kept, as it is in eager code.
    """
    arguments = pair.arguments()
    ours, by_hand = (kept(tf.function(op, autograph=False), arguments) for op in (pair.op, pair.by_hand))
    named = [*pair.shapes, *(pair.saved if pair.again else ())]
    assert ours == by_hand + collections.Counter(named)


def test_a_large_tensor_that_the_rule_does_not_use_is_not_kept():
    """But for the output of an `exp` or the like, of which TensorFlow's own record is a cycle (2.21)."""

    @op_custom_gradient
    def op(x):
        wide = tf.cos(x)
        wider = tf.sin(wide)
        e = tf.reduce_sum(x, 1, keepdims=True)
        return wide * wider * e, lambda u: u * e * 7.0

    assert kept(op, PAIRS["narrow"].arguments()) == {(8, 1): 1}


# ---------------------------------------------------------------------- what is told apart


@pytest.mark.parametrize(
    "test",
    [
        test_the_graph_that_runs,
        test_the_graph_as_traced,
        test_a_tape_keeps_the_residuals_alone,
        test_what_a_tape_keeps_of_a_graph,
    ],
)
def test_other_operations_and_other_residuals_are_found(test):
    with pytest.raises(AssertionError):
        test(DOUBTFUL)
