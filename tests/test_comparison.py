"""The facts in the README's comparison with other custom gradients that no page of `docs/` shows."""

import keras
import pytest
from support import BACKEND, array, close

from multigrad import grad


def tripled_square(x):
    """A function with a false rule, in the form that `keras.ops.custom_gradient` accepts on every backend."""
    square = x * x

    def rule(*args, upstream=None):
        upstream = args[-1] if upstream is None else upstream
        return upstream * 7.0 * square

    return square * x, rule


def keras_keyword_argument_raises():
    function = keras.ops.custom_gradient(tripled_square)
    with pytest.raises(TypeError):
        grad(lambda x: function(x=x))(array(2.0))


def keras_weight_raises():
    import jax

    weight = keras.Variable(3.0)
    function = keras.ops.custom_gradient(lambda x: (x * weight, lambda *args: args[-1]))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        grad(function, variables=[weight])(array(2.0))


def keras_has_another_signature():
    function = keras.ops.custom_gradient(lambda x: (x * 1.0, lambda upstream: upstream))
    with pytest.raises(TypeError):
        grad(function)(array(2.0))


def keras_second_derivative_is_missing():
    function = keras.ops.custom_gradient(tripled_square)
    close(grad(function)(array(2.0)), 28.0)
    close(grad(grad(function))(array(2.0)), 0.0)  # 28.0 by the rule


def custom_vjp_takes_keywords_and_needs_weights_as_arguments():
    import jax

    weight = keras.Variable(3.0)

    @jax.custom_vjp
    def scaled(x, factor=1.0):
        return x * weight * factor

    def forward(x, factor=1.0):
        return scaled(x, factor), (x, factor)

    scaled.defvjp(forward, lambda residuals, u: (u * 7.0, u * 5.0))
    close(grad(lambda x, f: scaled(x, factor=f), (0, 1))(array(2.0), array(3.0)), (7.0, 5.0))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        grad(scaled, variables=[weight])(array(2.0))


def function_takes_keywords_and_needs_weights_as_arguments():
    import torch

    weight = keras.Variable(3.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * weight.value

        @staticmethod
        def backward(ctx, u):
            return u * 7.0

    close(grad(lambda x: Scaled.apply(x=x))(array(2.0)), 7.0)
    of_x, of_weights = grad(Scaled.apply, 0, variables=[weight])(array(2.0))
    close((of_x, of_weights), (7.0, [0.0]))


def keras_second_derivative_uses_the_rule():
    """Keras calls `tf.custom_gradient`. docs/migrate/from-tensorflow.md shows the other facts about it."""
    function = keras.ops.custom_gradient(tripled_square)
    close(grad(function)(array(2.0)), 28.0)
    close(grad(grad(function))(array(2.0)), 28.0)


FACTS = {
    "tensorflow": [keras_second_derivative_uses_the_rule],
    "jax": [
        keras_keyword_argument_raises,
        keras_weight_raises,
        custom_vjp_takes_keywords_and_needs_weights_as_arguments,
    ],
    "torch": [
        keras_keyword_argument_raises,
        keras_has_another_signature,
        keras_second_derivative_is_missing,
        function_takes_keywords_and_needs_weights_as_arguments,
    ],
}


@pytest.mark.parametrize("fact", FACTS.get(BACKEND, ()), ids=lambda fact: fact.__name__)
def test_a_fact_of_the_comparison(fact):
    fact()
