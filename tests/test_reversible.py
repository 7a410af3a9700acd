"""A reversible network, whose rule recomputes every block from the output of the network.

The blocks draw random numbers and update moving averages, so a recomputed block must find the state before
the function, and must not update it a second time.

References:
    [Gomez et al. 2017, The reversible residual network](https://arxiv.org/abs/1707.04585).
"""

import gc

import keras
import numpy as np
import pytest
from counts import saved
from keras import ops
from support import BACKEND, array, close, numpy

from multigrad import grad, op_custom_gradient

BATCH, WIDTH = 8, 6
X = np.random.default_rng(0).normal(size=(BATCH, 2 * WIDTH)).astype("float32")


class Reversible(keras.layers.Layer):
    """Blocks of `y1 = x1 + f(x2)` and `y2 = x2 + g(y1)`, differentiated by inverting them one by one."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = [(self.branch(2 * i), self.branch(2 * i + 1)) for i in range(depth)]

    def branch(self, seed):
        initializer = keras.initializers.RandomNormal(stddev=0.2, seed=seed)
        dense = keras.layers.Dense(WIDTH, kernel_initializer=initializer)
        layers = [dense, keras.layers.BatchNormalization(), keras.layers.Dropout(0.25, seed=seed)]
        branch = keras.Sequential([keras.Input((WIDTH,)), *layers])
        setattr(self, f"branch_{seed}", branch)  # so that Keras tracks it
        return branch

    def plain(self, x):
        x1, x2 = ops.split(x, 2, axis=-1)
        for f, g in self.blocks:
            x1 = x1 + f(x2, training=True)
            x2 = x2 + g(x1, training=True)
        return ops.concatenate([x1, x2], axis=-1)

    @op_custom_gradient(name="reversible")
    def op(self, x):
        y = self.plain(x)

        def rule(upstream, variables):
            y1, y2 = ops.split(y, 2, axis=-1)
            u1, u2 = ops.split(upstream, 2, axis=-1)
            gradients = {}
            for f, g in reversed(self.blocks):
                gradient, value = self.pulled(g, y1, u2, gradients)
                y2, u1 = y2 - value, u1 + gradient
                gradient, value = self.pulled(f, y2, u1, gradients)
                y1, u2 = y1 - value, u2 + gradient
            return ops.concatenate([u1, u2], axis=-1), [gradients[variable.path] for variable in variables]

        return y, rule

    def pulled(self, branch, x, upstream, gradients):
        """Return the gradient and the value of a branch from one call, in which Dropout draws one mask."""

        def product(x):
            value = branch(x, training=True)
            return ops.sum(value * upstream), value

        variables = branch.trainable_variables
        (gradient, of_variables), value = grad(product, argnums=0, has_aux=True, variables=variables)(x)
        gradients.update(zip([variable.path for variable in variables], of_variables, strict=True))
        return gradient, value

    def call(self, x):
        return self.op(x)


def state_of(layer):
    return [numpy(variable) for variable in layer.non_trainable_variables]


def gradients(layer, function):
    variables = layer.trainable_variables
    return grad(lambda x: ops.sum(ops.sin(function(x))), argnums=0, variables=variables)(array(X))


@pytest.mark.slow_on("jax")
@pytest.mark.parametrize("depth", [3, 20])
def test_gradients_and_state_equal_the_plain_network(depth):
    plain, reversible = Reversible(depth), Reversible(depth)
    wanted = gradients(plain, plain.plain)
    close(gradients(reversible, reversible.op), wanted, 1e-3)
    close(state_of(reversible), state_of(plain))
    assert len(wanted[1]) == 8 * depth


def kept(layer, function):
    """Return the number of activations that the forward pass keeps for the backward pass."""
    x = array(X)
    if BACKEND == "jax":
        import jax

        trainable = [variable.value for variable in layer.trainable_variables]
        state = [variable.value for variable in layer.non_trainable_variables]

        def stateless(x, trainable):
            pairs = [*zip(layer.trainable_variables, trainable, strict=True)]
            pairs += zip(layer.non_trainable_variables, state, strict=True)
            with keras.StatelessScope(pairs):
                return function(x)

        return sum(
            leaf.shape[:1] == (BATCH,) for leaf in jax.tree.leaves(jax.vjp(stateless, x, trainable)[1])
        )
    if BACKEND == "torch":
        return sum(tensor.shape[:1] == (BATCH,) for tensor in saved(function, [x]))
    import tensorflow as tf

    # Compiled, as in `fit`. In eager code, the tape keeps the operations of the function, as it does for
    # `tf.custom_gradient`.
    compiled = tf.function(function)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = compiled(x)
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) is type(x)]
    assert tape is not None
    assert y is not None
    return sum(tensor.shape[:1] == (BATCH,) for tensor in alive)


@pytest.mark.parametrize("depth", [4, 20])
@pytest.mark.parametrize("kind", ["op", "plain"])
def test_memory_does_not_grow_with_the_depth(kind, depth):
    few, many = [kept(layer, getattr(layer, kind)) for layer in (Reversible(1), Reversible(depth))]
    if kind == "op":
        assert many == few
    else:
        assert many >= few + (depth - 1) * 4  # the measure also sees the activations of the plain network
