"""The functions that the package returns, as arguments of functions of Keras and of the frameworks.

Their attribute `__wrapped__` is the function that they wrap, which a framework may call in their place.
"""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close

import multigrad
from multigrad import grad, hessian, jacobian, jit, op_custom_gradient, vmap

FAST = {"backend": "eager"} if BACKEND == "torch" else {}


def cube(x):
    return x**3


def false_rule(x):
    return x**3, lambda upstream: upstream * 30.0 * x**2


class Power(keras.layers.Layer):
    """A layer whose methods are ops."""

    factor = keras.Variable(1.0)

    @op_custom_gradient
    def power(self, x):
        return false_rule(x)

    @op_custom_gradient
    def weighted(self, x):
        by_factor = lambda u, variables: (u * 30.0 * x**2 * self.factor, [u * x**3])  # noqa: E731
        return x**3 * self.factor, by_factor


# Each function with its value at 2 and its derivative there, which is false for an op.
FUNCTIONS = {
    "op": (op_custom_gradient(false_rule), 8.0, 120.0),
    "method": (Power().power, 8.0, 120.0),
    "weight": (Power().weighted, 8.0, 120.0),
    "grad": (grad(cube), 12.0, 12.0),
    "grad_of_grad": (grad(grad(cube)), 12.0, 6.0),
    "grad_of_op": (grad(op_custom_gradient(false_rule)), 120.0, 120.0),
    "jacobian": (jacobian(cube), 12.0, 12.0),
    "hessian": (hessian(cube), 12.0, 6.0),
    "compiled": (jit(grad(cube), **FAST), 12.0, 12.0),
    "compiled_in_grad": (grad(jit(cube, **FAST)), 12.0, 12.0),
    "with_numbers": (multigrad.ops.std, 0.0, 0.0),
}


def calls(function, x):
    return function(x)


def compiled_with_function(use):
    """Return `use(function, x)`, compiled by the framework, with the function as a static argument."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(use)
    if BACKEND == "jax":
        import jax

        return jax.jit(use, static_argnums=0)
    import torch

    return torch.compile(use, backend="eager")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_argument_of_a_compiled_function(name):
    function, value, derivative = FUNCTIONS[name]
    call, x = compiled_with_function(calls), array(2.0)
    close(call(lambda x: function(x), x), value)
    if BACKEND == "tensorflow" and inspect.ismethod(function):
        # TensorFlow (2.21) passes the decorated function, without `self`.
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            call(function, x)
        return
    close(call(function, x), value)
    close(grad(lambda x: call(function, x))(x), derivative)


def test_mapped_function_as_an_argument():
    rows = array([[1.0, 2.0], [3.0, 4.0]])
    close(compiled_with_function(calls)(vmap(ops.sum), rows), array([3.0, 7.0]))


@pytest.mark.parametrize("name", ["op", "grad"])
def test_default_of_a_compiled_function(name):
    function, value, derivative = FUNCTIONS[name]

    def call(x, function=function):
        return function(x)

    close(jit(call, **FAST)(array(2.0)), value)
    close(grad(jit(call, **FAST))(array(2.0)), derivative)


def test_functions_of_one_function_are_compiled_apart():
    call, x = compiled_with_function(calls), array(2.0)
    for function, value in (cube, 8.0), (grad(cube), 12.0), (jacobian(grad(cube)), 12.0), (cube, 8.0):
        close(call(function, x), value)


@pytest.mark.parametrize("name", ["op", "method", "weight", "grad", "jacobian"])
def test_argument_of_keras(name):
    function, value, derivative = FUNCTIONS[name]
    xs = array([2.0, 1.0, 2.0])
    close(ops.map(function, xs)[2], value)
    close(vmap(function)(xs)[2], value)
    close(grad(lambda xs: ops.map(function, xs)[2])(xs)[2], derivative)
    close(keras.layers.Lambda(function)(array(2.0)), value)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "with_numbers"])
def test_wrapped_function(name):
    function = FUNCTIONS[name][0]
    assert list(inspect.signature(function).parameters) == ["x"]
    assert callable(function.__wrapped__)


def test_a_wrapper_of_a_wrapper():
    """TensorFlow would call the function itself."""

    @functools.wraps(FUNCTIONS["op"][0])
    def doubled(x):
        return 2.0 * FUNCTIONS["op"][0](x)

    call, x = compiled_with_function(calls), array(2.0)
    if BACKEND == "tensorflow":
        with pytest.raises(TypeError, match="TensorFlow would call this function in place of an argument"):
            call(doubled, x)
    else:
        close(call(doubled, x), 16.0)
    close(call(lambda x: doubled(x), x), 16.0)


@pytest.mark.parametrize("keeps", [False, True], ids=["", "kept"])
def test_a_function_that_closes_over_a_tensor_of_an_op(keeps):
    """The rule has a copy of the function, with the tensor that is differentiated."""
    kept = []

    def define(calls):
        @op_custom_gradient
        def op(x):
            sine = ops.sin(x)
            slope = grad(lambda y: sine * y**3)
            kept.append(slope if keeps else None)
            return x**3, lambda upstream: upstream * calls(slope, x)

        return op

    def by_lambda(function, x):
        return call(lambda x: function(x), x)

    call = compiled_with_function(calls) if BACKEND == "tensorflow" else calls
    x = array(2.0)
    sine, cosine = np.sin(2.0), np.cos(2.0)
    for use in (calls, by_lambda):
        close(grad(define(use))(x), 12.0 * sine)
        close(grad(grad(define(use)))(x), 12.0 * (sine + cosine))
    if BACKEND == "tensorflow":
        with pytest.raises(TypeError, match="TensorFlow would call this function in place of an argument"):
            grad(define(call))(x)
