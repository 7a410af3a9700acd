"""The training mode and dtypes of the layers around a function, which its rule has, too."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops
from support import Phase, array, close, compiled

from multigrad import grad, op_custom_gradient, vjp
from multigrad.common.keras_internals import global_state, set_stored_value, stored_dtype, stored_value
from multigrad.core.context import current_context
from multigrad.core.variables import Reads


class Recomputed(keras.layers.Layer):
    """A layer that keeps only its input, and runs the inner layer again for the gradient."""

    def __init__(self, lazy=False, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.lazy = Phase(), lazy

    @op_custom_gradient
    def call(self, x):
        def rule(upstream):
            def compute():
                return 7.0 * vjp(self.inner, x)[1](upstream)[0]

            return compute if self.lazy else compute()

        return self.inner(x), rule


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("lazy", [False, True])
def test_training_mode(training, lazy):
    layer, x = Recomputed(lazy), array(1.0, 2.0)
    gradient = grad(lambda x: ops.sum(layer(x, training=training)))
    for run in (gradient, compiled(gradient)):
        close(run(x), array(21.0, 21.0) if training else array(7.0, 7.0))


class Squared(keras.layers.Layer):
    """The square of a normalized input. The rule uses the normalized input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.BatchNormalization(center=False, scale=False)

    def build(self, shape):
        self.norm.build(shape)

    @op_custom_gradient
    def call(self, x):
        h = self.norm(x)
        return h * h, lambda upstream: upstream * 14.0 * h


def test_a_second_derivative_through_a_layer_in_training():
    """A gradient penalty of a critic is such a derivative."""
    layer, x = Squared(), array(np.random.default_rng(0).normal(size=(8, 3)), dtype="float32")

    def penalty(x):
        return ops.sum(grad(lambda x: ops.sum(layer(x, training=True)))(x) ** 2)

    def expected(x):
        h = (x - ops.mean(x, 0)) / ops.sqrt(ops.var(x, 0) + 1e-3)
        return ops.sum((14.0 * h) ** 2)

    close(grad(penalty)(x), grad(expected)(x), 1e-2)


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)

    @op_custom_gradient
    def call(self, x):
        h = ops.sin(x) * self.scale

        def rule(upstream):
            assert keras.backend.standardize_dtype(ops.multiply(self.scale, 1).dtype) == "bfloat16"
            return upstream * 14.0 * h

        return h * h, rule


def test_mixed_precision():
    """The rule and a second run read a non-trainable weight in the dtype in which the function read it."""
    layer, x = Scaled(dtype="mixed_bfloat16"), array([[0.0, 0.5, 1.0]])

    def gradient(x):
        return ops.sum(grad(lambda x: ops.sum(ops.cast(layer(x), "float32")))(x))

    close(grad(gradient)(x), 14.0 * ops.cos(x), 5e-2)


def test_an_inner_layer_that_was_called_in_another_mode():
    layer, x = Recomputed(), array(1.0)
    inner = layer.inner

    class Both(keras.layers.Layer):
        @op_custom_gradient
        def call(self, x):
            y = inner(x) + inner(x, training=False)
            return y, lambda upstream: 7.0 * vjp(inner, x)[1](upstream)[0]

    both = Both()
    close(grad(lambda x: both(x, training=True))(x), array(21.0))


def test_a_gradient_in_a_layer():
    """A layer that the rule calls in another mode does not change the mode of layers after the rule."""
    phase = Phase()

    @op_custom_gradient
    def op(x):
        return x * 2.0, lambda upstream: 7.0 * phase(upstream, training=False)

    class Outer(keras.layers.Layer):
        def call(self, x, training=None):
            return phase(grad(op)(x))

    close(Outer()(array(1.0), training=True), array(21.0))


class Failing(keras.layers.Layer):
    @op_custom_gradient
    def call(self, x):
        def rule(upstream):
            raise AssertionError("on purpose")

        return x * 2.0, rule


def test_the_mode_ends_with_the_rule():
    layer, failing, x = Recomputed(), Failing(), array(1.0)
    grad(lambda x: layer(x, training=True))(x)
    assert current_context() is None
    close(Phase()(x), x)
    with pytest.raises(AssertionError, match="on purpose"):
        grad(lambda x: failing(x, training=True))(x)
    assert current_context() is None


def test_the_call_context_is_not_kept_alive():
    """A graph that referred to the call context would keep the model alive."""
    left = []
    for _ in range(2):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), Recomputed()])
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
        left.append(weakref.ref(model))
        del model
        keras.utils.clear_session()
        gc.collect()
    assert [model() for model in left] == [None, None]


def test_the_private_names_of_keras_exist():
    """The test fails if a version of Keras renames them."""
    found = []
    variable = keras.Variable(1.0, dtype="float32")

    class Asking(keras.layers.Layer):
        def call(self, x, training=None):
            found.append(current_context())
            assert (variable.dtype, stored_dtype(variable)) == ("bfloat16", "float32")
            return x

    Asking(dtype="mixed_bfloat16")(array(1.0), training=True)
    (context,) = found
    assert context.attributes["training"] is True
    assert context.scopes["autocast_scope"].dtype == "bfloat16"
    assert current_context() is None

    close(stored_value(variable), 1.0)
    set_stored_value(variable, ops.convert_to_tensor(2.0))
    close(variable, 2.0)
    with keras.StatelessScope():
        created = keras.Variable(lambda shape, dtype: ops.ones(shape, dtype), shape=(2,))
        assert stored_value(created) is None


def test_a_scope_is_active_as_a_scope_of_keras():
    """The scope is also found after `clear_session`, which replaces the global state."""
    keras.utils.clear_session()
    with keras.StatelessScope() as around:
        with Reads() as reads, keras.StatelessScope() as within:
            assert reads.original_scope is around
            assert within.original_scope is reads
        with keras.StatelessScope() as behind:
            assert behind.original_scope is around
    assert global_state.GLOBAL_STATE_TRACKER.stateless_scope is None
