"""Ops in layers of lower precision: the dtypes in the rule, and training with `fit`."""

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, numpy

from multigrad import op_custom_gradient

X = np.float32([[1.0, 0.5, 0.25], [-0.5, 1.0, 2.0], [0.125, 0.0, 1.0], [1.0, 1.0, -1.0]]) / 8
Y = np.zeros((4, 2), "float32")
RATE = 0.25

# The compute dtype of each policy, and the tolerance of a step.
POLICIES = {"mixed_float16": ("float16", 2e-3), "mixed_bfloat16": ("bfloat16", 2e-2)}
MODES = {"eager": {"run_eagerly": True}, "compiled": {"jit_compile": False}, "jit": {"jit_compile": True}}
if BACKEND == "torch":
    del MODES["jit"]  # needs a C++ compiler and 15 seconds

policies = pytest.mark.parametrize("policy", POLICIES)
modes = pytest.mark.parametrize("mode", MODES)


class Product(keras.layers.Layer):
    """A product with a kernel, which is an argument of the op. The gradient is three times the true one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.met = []
        met = self.met

        @op_custom_gradient
        def product(x, w):
            met.extend(keras.backend.standardize_dtype(tensor.dtype) for tensor in (x, w))

            def rule(u):
                met.append(keras.backend.standardize_dtype(u.dtype))
                return ops.matmul(u, ops.transpose(w)), 3.0 * ops.matmul(ops.transpose(x), u)

            return ops.matmul(x, w), rule

        self.product = product

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), initializer="ones", name="kernel")

    def call(self, x):
        return self.product(x, self.kernel)


def model_of(policy, optimizer=None, **compiling):
    layer = Product(dtype=policy)
    # The policy of the model, which decides on loss scaling, is the policy of the layer.
    model = keras.Sequential([layer])
    model.dtype_policy = keras.DTypePolicy(policy)
    model.compile(optimizer or keras.optimizers.SGD(RATE), loss="mse", **compiling)
    return model, layer


def exact_step(kernel):
    """Return the kernel after a step of gradient descent on the mean square, according to the rule."""
    return kernel - RATE * 3.0 * X.T @ (2.0 * (X @ kernel - Y) / Y.size)


@policies
@modes
def test_a_step_of_fit_follows_the_rule(policy, mode):
    compute, tolerance = POLICIES[policy]
    model, layer = model_of(policy, **MODES[mode])
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    model.fit(X, Y, batch_size=4, verbose=0)
    start = np.ones((3, 2), "float32")
    step = exact_step(start) - start
    assert layer.kernel.dtype == "float32"
    np.testing.assert_allclose(numpy(layer.kernel) - start, step, atol=tolerance * np.abs(step).max())
    assert set(layer.met) == {compute}


@modes
def test_a_step_that_overflows_is_skipped(mode):
    """In float16, a scaled loss may overflow in the rule. Then the scale is halved, and no weight moves."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=2.0**24)
    model, layer = model_of("mixed_float16", optimizer, **MODES[mode])
    assert model.optimizer is optimizer
    model.fit(X, Y, batch_size=4, verbose=0)
    close(layer.kernel, np.ones((3, 2)))
    close(optimizer.dynamic_scale, array(2.0**23))
