"""An op equals a hand-written `tf.custom_gradient`: the graph that runs, and what a tape keeps."""

import collections
import gc

import pytest
import tensorflow as tf
from by_hand import PAIRS, total

from multigrad import op_custom_gradient

pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def traced(op, pair):
    """Return the graph of the value and the gradients, and its fetches."""

    def step(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = total(op)(*tensors)
        return value, tape.gradient(value, tensors)

    return tf.function(step, autograph=False).get_concrete_function(*pair.arguments())


def kinds(graph):
    """Return the number of operations per type, without constants: TensorFlow merges equal ones."""
    return collections.Counter(node.op for node in graph.node if node.op != "Const")


def as_run(concrete, arguments):
    """Return the graph that TensorFlow runs, after its optimizer (Grappler)."""
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


def kept(op, arguments):
    """Return the shapes of the tensors that a tape keeps alive after a call, without scalars."""

    def call():
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            return tape, op(*arguments)

    call()  # traces the function, if it is a `tf.function`
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


in_one_step = {name: pair for name, pair in PAIRS.items() if name != "narrow"}


@pytest.mark.parametrize("pair", in_one_step.values(), ids=in_one_step)
def test_a_tape_keeps_only_the_residuals(pair):
    """Inputs and outputs belong to the caller."""
    computed = pair.saved if pair.again else ()
    assert kept(pair.op, pair.arguments()) == collections.Counter(computed)


def test_unused_large_tensors_are_not_kept():
    """TensorFlow (2.21) keeps the output of operations such as `exp`, whose record is a reference cycle."""

    @op_custom_gradient
    def op(x):
        wide = tf.cos(x)
        wider = tf.sin(wide)
        e = tf.reduce_sum(x, 1, keepdims=True)
        return wide * wider * e, lambda u: u * e * 7.0

    assert kept(op, PAIRS["narrow"].arguments()) == {(8, 1): 1}
