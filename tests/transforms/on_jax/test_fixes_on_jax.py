"""The errors of JAX's backend: each fix works."""

import jax
import keras
import numpy as np
from fixing import Row, check
from support import array

from multigrad import grad, jit, op_custom_gradient, value_and_grad
from multigrad.ops import host_call

X = np.ones(3, "float32")


@op_custom_gradient
def tripled(x):
    return x * 2.0, lambda upstream: upstream * 3.0


def total(x):
    return keras.ops.sum(tripled(x))


def scaled(x, n):
    return total(x) * n[0]


def stored(last):
    """Return an op that assigns its input to a variable."""

    @op_custom_gradient
    def op(x):
        last.assign(x)
        return x * 1.0, lambda upstream: upstream * 3.0

    return op


def of_variable(compiler):
    variable = keras.Variable(2.0)
    return compiler(lambda x: grad(lambda: total(variable) * x, (), variables=[variable])()[1][0])(array(5.0))


def with_layer(compiler):
    layers = []

    def f(x):
        if not layers:
            layers.append(keras.layers.Dense(1, kernel_initializer="ones"))
        return total(layers[0](x[None]))

    return compiler(f)(array(X))


def creating(inside):
    outside = keras.layers.Dense(1, kernel_initializer="ones")

    def f(x):
        layer = keras.layers.Dense(1, kernel_initializer="ones") if inside else outside
        return total(layer(x[None]))

    return jit(f)(array(X))


def squared_sine(is_separate):
    @op_custom_gradient
    def sine_of(x):
        return jax.pure_callback(np.sin, x, x), lambda upstream: upstream * keras.ops.cos(x)

    @op_custom_gradient
    def op(x):
        sine = sine_of(x) if is_separate else jax.pure_callback(np.sin, x, x)
        return sine**2, lambda upstream: upstream * 7.0 * sine

    return grad(grad(op))(array(0.0))


def host(dtype):
    @op_custom_gradient
    def op(x):
        output = keras.KerasTensor((), dtype)
        return host_call(np.dtype(dtype).type, x, output=output), lambda upstream: upstream * 7.0

    return grad(op)(1.0)


def drawn(inside):
    seed = keras.random.SeedGenerator(1)

    def f(x):
        noise = None if inside else keras.random.uniform((2,), seed=seed) * 0.0

        def step(carry, noise):
            return total(carry) + (keras.random.uniform((), seed=seed) if inside else noise), None

        return jax.lax.scan(step, x, noise, 2)[0]

    return grad(f)(1.0)


def steep(is_argument):
    slope = keras.Variable(5.0)

    @op_custom_gradient
    def reading(x):
        return keras.ops.sign(x), lambda upstream: upstream * slope

    @op_custom_gradient
    def passed(x, slope):
        return keras.ops.sign(x), lambda upstream: (upstream * slope, None)

    op = (lambda x: passed(x, slope)) if is_argument else reading
    return value_and_grad(lambda x: keras.ops.sum(op(x)), 0, variables=[slope])(X)[1][0]


ROWS = [
    Row("pass the variable to the op as an argument", lambda: steep(False), lambda: steep(True), 5.0 * X),
    Row("draw the random numbers before the loop", lambda: drawn(True), lambda: drawn(False), 9.0),
    Row("use static_argnames for static arguments", lambda: jit(scaled, static_argnums=1),
        lambda: jit(grad(scaled), static_argnames="n")(array(X), n=(2.0,)), 6.0 * X),
    Row("pass a tuple for a list", lambda: jit(scaled, static_argnames="n")(array(X), [2.0]),
        lambda: jit(grad(scaled), static_argnames="n")(array(X), (2.0,)), 6.0 * X),
    Row("create layers, optimizers, metrics and variables outside of the function", lambda: creating(True),
        lambda: creating(False), 6.0, ValueError),
    Row("or replace jax.jit by multigrad.jit", lambda: with_layer(lambda f: jax.jit(jit(f))),
        lambda: with_layer(jit), 6.0),
    Row("compile with multigrad.jit in place of jax.jit",
        lambda: jax.jit(stored(keras.Variable(0.0, trainable=False)))(2.0),
        lambda: jit(grad(stored(keras.Variable(0.0, trainable=False))))(array(2.0)), 3.0),
    Row("compile with multigrad.jit instead of jax.jit", lambda: of_variable(jax.jit),
        lambda: of_variable(jit), 15.0),
    Row("compute the intermediate result in a separate op that returns it", lambda: squared_sine(False),
        lambda: squared_sine(True), 7.0, NotImplementedError),
    Row("declare an output of dtype float32, and return an array of this dtype", lambda: host("float64"),
        lambda: host("float32"), 7.0),
]  # fmt: skip


def test_the_fixes_of_errors_on_jax():
    check(ROWS, ["backend/jax"], {"_push": "a note of an error of JAX"})
