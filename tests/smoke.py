"""One op in every way of an active backend that a version of its framework may lose, in one short program.

It needs no pytest, so that the tests of an installed package run it outside of the clone, too.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import ops

import multigrad

BACKEND = keras.backend.backend()


@multigrad.op_custom_gradient(name="smoke>square")
def square(x):
    """Return the square. The rule returns 7 x, which plain differentiation does not."""

    def grad(upstream):
        return upstream * 7.0 * x

    return x * x, grad


@multigrad.op_custom_gradient
def exponential(x):
    y = ops.exp(x)
    return y, lambda upstream: -3.0 * upstream * y


def near(got, wanted):
    np.testing.assert_allclose(keras.ops.convert_to_numpy(got), wanted, rtol=1e-4)


def orders():
    near(multigrad.grad(square)(3.0), 21.0)
    near(multigrad.grad(multigrad.grad(square))(3.0), 7.0)
    near(multigrad.grad(multigrad.grad(exponential))(0.0), 9.0)
    near(multigrad.jvp(exponential, (0.0,), (1.0,))[1], -3.0)
    near(multigrad.hessian(lambda x: ops.sum(square(x)))(ops.array([1.0, 2.0])), 7.0 * np.eye(2))


def transforms():
    if BACKEND == "jax":
        import jax

        near(jax.jit(jax.vmap(jax.grad(square)))(ops.array([1.0, 2.0])), [7.0, 14.0])
        near(jax.jit(jax.grad(jax.grad(square)))(3.0), 7.0)
        near(
            jax.grad(lambda x: jax.lax.scan(lambda c, _: (square(c), None), x, None, 2)[0])(2.0), 7.0 * 4 * 14
        )
    elif BACKEND == "torch":
        import torch

        near(torch.func.vmap(torch.func.grad(square))(torch.tensor([1.0, 2.0])), [7.0, 14.0])
        x = torch.tensor(3.0, requires_grad=True)
        compiled = torch.compile(square, backend="aot_eager", fullgraph=True)
        near(torch.autograd.grad(compiled(x), x)[0], 21.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            near(torch.autograd.grad(square(x), x)[0].detach(), 21.0)
    else:
        import tensorflow as tf

        @tf.function
        def slope(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = square(x)
            return tape.gradient(y, x)

        near(slope(tf.constant(3.0)), 21.0)


def training():
    for how in {"run_eagerly": True}, {"jit_compile": False}:
        inputs = keras.Input((1,))
        hidden = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
        model = keras.Model(inputs, square(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mean_absolute_error", **how)
        model.fit(np.ones((2, 1), "float32"), np.zeros((2, 1), "float32"), epochs=1, verbose=0)
        near(model.trainable_variables[0], [[1.0 - 0.1 * 7.0]])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    near(loaded.predict(np.ones((1, 1), "float32"), verbose=0), [[0.09]])


def run():
    orders()
    transforms()
    training()
    print("every gradient follows the rule")


if __name__ == "__main__":
    run()
