"""The loss of a large vocabulary in graphs of TensorFlow, whose number of tokens may be unknown."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import close
from tapes import tape_gradient

from multigrad.calculus.derivatives import value_and_grad
from multigrad.ops import linear_cross_entropy

X, Y = tf.constant([[1.0, -1.0], [0.5, 2.0], [0.0, 1.0]]), tf.constant([0, 2, 1])
reductions = pytest.mark.parametrize("reduction", [None, "sum"])
few_or_any = pytest.mark.parametrize("tokens", [3, None])


def kernel(classes):
    return tf.reshape(tf.range(2.0 * classes) / 8, (2, -1))


def head(x, reduction, classes=4):
    labels = Y[: tf.shape(x)[0]]
    losses = linear_cross_entropy(x, kernel(classes), labels, block_size=2, reduction=reduction)
    return tf.reduce_sum(losses**2)


def plain_head(x, reduction, classes=4):
    logits = x @ kernel(classes)
    losses = keras.losses.sparse_categorical_crossentropy(Y[: tf.shape(x)[0]], logits, from_logits=True)
    return tf.reduce_sum(losses**2) if reduction is None else tf.reduce_sum(losses) ** 2


def both(reduction, classes=4):
    return [functools.partial(f, reduction=reduction, classes=classes) for f in (head, plain_head)]


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


def in_branch(f, otherwise):
    return lambda x: tf.cond(tf.reduce_sum(x) > -9.0, lambda: f(x), lambda: otherwise(x))


DERIVATIVES = {"reverse": tape_gradient, "twice": twice, "forward": forward, "mixed": forward_over_reverse}
WITHIN = {"eager": lambda f: f, "function": tf.function, "branch": lambda f: in_branch(f, lambda x: 0.0)}
AROUND = {
    "eager": lambda f: f,
    "function": tf.function,
    "any number": lambda f: tf.function(f, input_signature=[tf.TensorSpec((None, 2))]),
}
OTHERS = {
    "XLA": lambda f: tf.function(f, jit_compile=True),
    "branch": lambda f: tf.function(in_branch(f, tf.identity)),
}
# TensorFlow has no forward mode of a branch.
CHOSEN = [
    *itertools.product(DERIVATIVES, ["eager", "function"], AROUND),
    *itertools.product(["reverse", "twice"], ["branch"], AROUND),
    *itertools.product(["reverse"], ["eager"], OTHERS),
]


@reductions
@pytest.mark.parametrize(("name", "within", "around"), CHOSEN)
def test_derivatives_in_graphs(name, within, around, reduction):
    own, wanted = both(reduction)
    derivative = DERIVATIVES[name]
    got = (AROUND | OTHERS)[around](lambda x: derivative(WITHIN[within](own), x))
    close(got(X), derivative(wanted, X))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 300])
@pytest.mark.parametrize("jit", [False, True])
@reductions
def test_one_graph_for_an_unknown_number_of_tokens(tokens, jit, reduction):
    random = np.random.default_rng(0)
    width = 100
    w = tf.constant(random.standard_normal((width, 7)) / 10, "float32")
    features = tf.constant(random.standard_normal((600, width)), "float32")
    labels, weights = tf.range(600) % 7, tf.linspace(0.0, 1.0, 600)

    def loss(x, w):
        count = tf.shape(x)[0]
        given = {"sample_weight": weights[:count], "reduction": reduction, "block_size": 64}
        return 3.0 * tf.reduce_sum(linear_cross_entropy(x, w, labels[:count], **given))

    def plain(x, w):
        count = tf.shape(x)[0]
        losses = keras.losses.sparse_categorical_crossentropy(labels[:count], x @ w, from_logits=True)
        return 3.0 * tf.reduce_sum(weights[:count] * losses)

    def gradients(loss):
        return lambda x: value_and_grad(loss, argnums=(0, 1))(x, w)

    own = tf.function(gradients(loss), jit_compile=jit, input_signature=[tf.TensorSpec((tokens, width))])
    for count in (0, 1, 63, 64, 65, 300, 576, 600) if tokens is None else (tokens,):
        close(own(features[:count]), gradients(plain)(features[:count]), 1e-4)


@pytest.mark.parametrize("count", [1, 2, 5, 70])
@pytest.mark.parametrize("jit", [False, True])
@reductions
def test_tokens_without_labels_raise_in_a_graph(count, jit, reduction):
    w = tf.ones((2, 4))

    @tf.function(input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None,), "int32")], jit_compile=jit)
    def loss(x, y):
        return linear_cross_entropy(x, w, y, reduction=reduction)

    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError), match=r"(?i)as many labels|shape|size|indices"
    ):
        loss(tf.ones((count, 2)), tf.zeros((3,), "int32"))


@few_or_any
@reductions
def test_a_vectorized_map_of_gradients(tokens, reduction):
    factors = tf.constant([0.5, 1.0, 2.0])
    own, wanted = both(reduction, classes=20)

    @tf.function(input_signature=[tf.TensorSpec((tokens, 2))])
    def mapped(x):
        return tf.vectorized_map(lambda factor: tape_gradient(own, factor * x), factors)

    close(mapped(X), tf.stack([tape_gradient(wanted, factor * X) for factor in factors]))


@pytest.mark.filterwarnings("ignore:.*while_loop for converting")
@few_or_any
@pytest.mark.parametrize("by", [0, 1])
@reductions
def test_a_gradient_around_a_vectorized_map_raises(tokens, by, reduction):
    """The gradient with respect to unmapped arguments would be zero."""
    x, w, factors = tf.ones((3, 2)), tf.ones((2, 4)), tf.constant([0.5, 1.0])

    def gradient(x, w):
        def mapped(factors, w):
            def loss(factor):
                labels = Y[: tf.shape(x)[0]]
                return linear_cross_entropy(factor * x, w, labels, reduction=reduction)

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
