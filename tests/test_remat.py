"""Rematerialization: the backward pass runs the function again, and the rule still applies."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, compiled, compiled_with_variables

from multigrad import grad, jacobian, op_custom_gradient

X = np.float32([[1.0, 0.5], [0.25, -1.0]])
W = np.float32([[0.5, -1.0], [1.0, 0.25]])
RATE = 0.125


class Runs:
    """Counts the runs of a function. On JAX, which traces the function, it counts the runs of the program."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        if BACKEND == "jax":
            import jax

            jax.debug.callback(self._add)
        else:
            self._add()

    def _add(self):
        self.count += 1

    def of(self, function, *args):
        """Return the result of the function, and the number of runs."""
        self.count = 0
        answer = function(*args)
        if BACKEND == "jax":
            import jax

            jax.effects_barrier()
        return answer, self.count


def define(runs):
    """Return exp(x w), whose gradients are three and seven times the true ones."""

    @op_custom_gradient
    def op(x, w):
        runs()
        e = ops.exp(ops.matmul(x, w))

        def rule(u):
            return (3.0 * ops.matmul(u * e, ops.transpose(w)), 7.0 * ops.matmul(ops.transpose(x), u * e))

        return e * 1.0, rule

    return op


def gradients_by_the_rule(x, w, upstream):
    e = np.exp(x @ w)
    return 3.0 * (upstream * e) @ w.T, 7.0 * x.T @ (upstream * e)


@pytest.mark.parametrize("wrap", [lambda f: f, compiled])
def test_an_op(wrap):
    runs = Runs()
    op = define(runs)
    wanted = gradients_by_the_rule(X, W, 2.0 * np.exp(X @ W))
    for function, count in ((op, 1), (keras.remat(op), 2)):
        gradients = grad(lambda x, w: ops.sum(function(x, w) ** 2), argnums=(0, 1))
        got, ran = runs.of(wrap(gradients), array(X), array(W))
        close(list(got), list(wanted))
        assert ran == count


class Layer(keras.layers.Layer):
    def __init__(self, op, **kwargs):
        super().__init__(**kwargs)
        self.op = op

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2), initializer=keras.initializers.Constant(W))

    def call(self, x):
        return self.op(x, self.kernel)

    def compute_output_shape(self, shape):  # for "larger_than" on JAX, where Keras cannot infer it
        return (shape[0], 2)


def with_an_activation(op):
    """Return a layer whose `activation` the mode "activations" rematerializes, with the same gradient."""
    initializer = keras.initializers.Constant(W)
    return keras.layers.Dense(2, lambda x: op(x, ops.eye(2)), use_bias=False, kernel_initializer=initializer)


SCOPES = {
    "activations": {"mode": "activations"},
    "full": {"mode": "full"},
    "list_of_layers": {"mode": "list_of_layers", "layer_names": ["mine"]},
    "larger_than": {"mode": "larger_than", "output_size_threshold": 1},
}
MODES = {"eager": {"run_eagerly": True}, "compiled": {"jit_compile": False}, "jit": {"jit_compile": True}}
if BACKEND == "torch":
    del MODES["jit"]  # needs a C++ compiler and 15 seconds


def fit_once(layer, model, mode):
    model.compile(keras.optimizers.SGD(RATE), loss=lambda y, p: ops.sum(p * y, -1), **MODES[mode])
    model.fit(X, np.ones((2, 2), "float32"), batch_size=2, verbose=0)
    return layer.kernel


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer(scope, mode):
    _, by_rule = gradients_by_the_rule(X, W, np.full((2, 2), 0.5))
    if scope == "activations":
        by_rule *= 3.0 / 7.0  # the gradient with respect to the first argument of the op
    counts = []
    for mode_of_scope in ({"mode": None}, SCOPES[scope]):
        runs = Runs()
        with keras.RematScope(**mode_of_scope):
            own = scope != "activations"
            layer = Layer(define(runs), name="mine") if own else with_an_activation(define(runs))
        model = keras.Sequential([layer])
        model.build((2, 2))
        kernel, ran = runs.of(fit_once, layer, model, mode)
        close(kernel, W - RATE * by_rule)
        counts.append(ran)
    without, rematerialized = counts
    assert rematerialized > without


@pytest.mark.parametrize("wrap", [lambda f: f, compiled_with_variables], ids=["eager", "compiled"])
@pytest.mark.parametrize("calculus", [grad, jacobian])
def test_variables(calculus, wrap):
    """TensorFlow's `recompute_grad` supports arguments and watched variables. Other gradients raise."""
    scale = keras.Variable(3.0, name="scale")

    @op_custom_gradient
    def op(x, s):
        return x * s, lambda u: (u * s * 7.0, u * x * 7.0)

    def by_itself(x):
        return keras.remat(lambda x: op(x, scale))(x)

    def by_argument(x):
        return keras.remat(op)(x, scale.value)

    x = array(2.0)
    close(wrap(calculus(by_argument, variables=[scale]))(x)[0], array(14.0))
    close(wrap(calculus(by_itself))(x), array(21.0))
    derivative = wrap(calculus(by_itself, variables=[scale]))
    if BACKEND == "tensorflow":
        with pytest.raises(TypeError, match="scale"):
            derivative(x)
    else:
        close(derivative(x)[0], array(14.0))
