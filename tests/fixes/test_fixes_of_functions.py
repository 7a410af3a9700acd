"""The errors about derivatives, maps, traces, callbacks and saved models: each fix works."""

import functools

import keras
import numpy as np
import pytest
from fixing import Row, check
from keras import ops
from support import BACKEND, array

import multigrad
from multigrad import grad, jacobian, jvp, op_custom_gradient, vjp, vmap
from multigrad.callbacks import GradientLogger
from multigrad.keras_graph.node import Application

X = np.ones(3, "float32")
THREE = 3.0 * X


@op_custom_gradient
def tripled(x):
    """Return 2 x, with the false factor 3 in the rule."""
    return x * 2.0, lambda upstream: upstream * 3.0


def total(x):
    return ops.sum(tripled(x))


def product(x, y):
    return tripled(x) * y


def of_variables(variables):
    return grad(lambda: total(variable), (), variables=variables)()[1]


variable = keras.Variable(2.0, name="variable")
norm = keras.layers.BatchNormalization(epsilon=0.0)
norm.build((None, 1))


def normalized(training):
    return vmap(lambda x: tripled(norm(x[None, None], training=training)[0, 0]))(X)


complex_x = np.ones(2, "complex64")
PAIR = np.ones((2, 3), "float32")


class Foreign:
    """An array of another framework."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("Can't call numpy()")


DERIVATIVES = [
    Row("pass a NumPy array", lambda: grad(total)(Foreign()), lambda: grad(total)(X), THREE),
    Row("pass the function itself", lambda: grad(total(X)), lambda: grad(total)(X), THREE),
    Row("call jvp(f, (x,), (tangent,))", lambda: jvp(tripled, 2.0, 1.0), lambda: jvp(tripled, (2.0,), (1.0,)),
        (4.0, 3.0)),
    Row("with None for zero", lambda: jvp(tripled, (X,), ([X],)), lambda: jvp(tripled, (X,), (None,))[1],
        0.0 * X),
    Row("pass a tensor of shape (3,)", lambda: jvp(tripled, (X,), ("a",)),
        lambda: jvp(tripled, (X,), (X,))[1], THREE),
    Row("pass the real part", lambda: jvp(tripled, (X,), (X * 1j,)),
        lambda: jvp(tripled, (X,), (np.real(X * 1j).astype("float32"),))[1], 0.0 * X),
    Row("pass one number per element", lambda: vjp(tripled, X)[1](X[:2]), lambda: vjp(tripled, X)[1](X)[0],
        THREE, ValueError),
    Row("reduce the output, for example with ops.sum", lambda: grad(tripled)(X),
        lambda: grad(lambda x: ops.sum(tripled(x)))(X), THREE),
    Row("use multigrad.jacobian", lambda: grad(tripled)(X), lambda: jacobian(tripled)(X), 3.0 * np.eye(3)),
    Row("the real and imaginary parts as two tensors", lambda: jacobian(tripled)(complex_x),
        lambda: jacobian(lambda x, y: (tripled(x), tripled(y)))(1.0, 2.0), (3.0, 0.0)),
    Row("pass variables=[variable]", lambda: of_variables(variable), lambda: of_variables([variable]), [3.0]),
    Row("pass the trainable_variables of the layer or model", lambda: of_variables(keras.layers.Dense(1)),
        lambda: of_variables([variable]), [3.0]),
    Row("pass, for example, the trainable_variables of a model", lambda: of_variables([variable, variable]),
        lambda: of_variables([variable]), [3.0]),
    Row("'variables'[0]", lambda: of_variables([array(1.0)]), lambda: of_variables([variable]), [3.0]),
    Row("build the model before", lambda: of_variables(keras.layers.Dense(1).trainable_variables),
        lambda: of_variables([variable]), [3.0], ValueError),
    Row("compute the loss with keras.ops", lambda: grad(lambda x: np.sum(X))(X), lambda: grad(total)(X),
        THREE),
    Row("return a pair, or omit has_aux", lambda: grad(total, has_aux=True)(X),
        lambda: grad(lambda x: (total(x), 1), has_aux=True)(X)[0], THREE),
    Row("return a pair, or omit has_aux", lambda: grad(total, has_aux=True)(X), lambda: grad(total)(X),
        THREE),
    Row("pass argnums=0 or argnums=(0, 1)", lambda: grad(product, "x")(2.0, 5.0),
        lambda: grad(product, (0, 1))(2.0, 5.0), (15.0, 4.0)),
    Row("remove the duplicate", lambda: grad(product, (0, 0))(2.0, 5.0),
        lambda: grad(product, (0,))(2.0, 5.0), (15.0,)),
    Row("pass the argument by position, or correct argnums", lambda: grad(product, 1)(2.0, y=5.0),
        lambda: grad(product, 1)(2.0, 5.0), 4.0),
    Row("pass floats, or leave it out of argnums and variables", lambda: grad(product, (0, 1))(2.0, 5),
        lambda: grad(product, (0, 1))(2.0, 5.0), (15.0, 4.0)),
    Row("pass floats, or leave it out of argnums and variables", lambda: grad(product, (0, 1))(2.0, 5),
        lambda: grad(product, 0)(2.0, 5), 15.0),
]  # fmt: skip

MAPS = [
    Row("pass the function itself", lambda: vmap(3.0), lambda: vmap(tripled)(X), 2.0 * X),
    Row("pass in_axes=0, or in_axes=(0, None)", lambda: vmap(tripled, in_axes="0"),
        lambda: vmap(product, in_axes=(0, None))(X, 3.0), 6.0 * X),
    Row("pass one entry per positional argument", lambda: vmap(product, (0,))(X, 3.0),
        lambda: vmap(grad(product), (0, None))(X, 5.0), 15.0 * X, ValueError),
    Row("with the containers and keys of the value",
        lambda: vmap(lambda d: tripled(d["x"]), ({"y": 0},))({"x": X}),
        lambda: vmap(grad(lambda d: tripled(d["x"])), ({"x": 0},))({"x": X}), {"x": THREE}),
    Row("set its axis to None", lambda: vmap(lambda x, n: tripled(x) * n)(X, 2),
        lambda: vmap(grad(lambda x, n: tripled(x) * n), (0, None))(X, 2), 2.0 * THREE),
    Row("so pass it by position", lambda: vmap(lambda x, n: tripled(x) * n)(X, n=2),
        lambda: vmap(grad(lambda x, n: tripled(x) * n), (0, None))(X, 2), 2.0 * THREE),
    Row("return the tensors only", lambda: vmap(lambda x: (tripled(x), "text"))(X),
        lambda: vmap(grad(tripled))(X), THREE),
    Row("correct the axis", lambda: vmap(total, 2)(PAIR), lambda: vmap(grad(total), 1, 1)(PAIR), 3.0 * PAIR,
        ValueError),
    Row("set it to None for a tensor that is not mapped", lambda: vmap(product)(X, array(5.0)),
        lambda: vmap(grad(product), (0, None))(X, 5.0), 15.0 * X, ValueError),
    Row("call a BatchNormalization with training=False", lambda: normalized(True), lambda: normalized(False),
        2.0 * X, ValueError),
    Row("set an axis in in_axes", lambda: vmap(tripled, None)(X), lambda: vmap(grad(tripled), 0)(X), THREE,
        ValueError),
    Row("correct in_axes, with None for an argument", lambda: vmap(product)(X, X[:2]),
        lambda: ops.sum(vmap(lambda x, y: ops.sum(product(x, y)), (0, None))(X, X[:2])), 12.0, ValueError),
]  # fmt: skip


def test_the_fixes_of_errors_about_derivatives():
    check([*DERIVATIVES, *MAPS], ["calculus"], {
        "get_current_value": "on TensorFlow only",
        "require_not_constant": "on JAX only",
    })  # fmt: skip


def model_with(layer):
    model = keras.Sequential([keras.Input((3,)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@functools.cache
def logged():
    return fitted(GradientLogger(every=100))


def fitted(logger, model=None):
    model = model or model_with(keras.layers.Dense(1))
    model.fit(np.ones((2, 3), "float32"), np.zeros((2, 1), "float32"), verbose=0, callbacks=[logger])
    return logger


class WithoutOptimizer(keras.Model):
    """A model whose step does not use its optimizer, unless `uses` is set."""

    def __init__(self, uses):
        super().__init__()
        self.dense, self.uses = keras.layers.Dense(1), uses
        self.dense.build((None, 3))

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        if self.uses:
            return super().train_step(*args)
        return ({}, args[0]) if keras.backend.backend() == "jax" else {}


def custom(uses):
    model = WithoutOptimizer(uses)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def uncompiled():
    logger = GradientLogger()
    logger.set_model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    logger.on_train_begin()


CALLBACKS = [
    Row("such as every=100", lambda: GradientLogger(every=0), lambda: fitted(GradientLogger(every=100)), None,
        ValueError),
    Row("pass stop_on_nan=True", lambda: GradientLogger(restore_weights=True),
        lambda: GradientLogger(restore_weights=True, stop_on_nan=True), None, ValueError),
    Row("pass the logger to `fit` first", lambda: GradientLogger().table(), lambda: logged().table(), None,
        ValueError),
    Row("or omit the argument", lambda: logged().table(7), lambda: logged().table(), None, ValueError),
    Row("call model.compile(optimizer, loss)", uncompiled, lambda: logged(), None, ValueError),
    Row("pass one of these texts", lambda: logged().plot("norms"), lambda: logged().plot("weights"), None,
        ValueError),
    Row("pass the logger to `fit` first", lambda: GradientLogger().plot(), lambda: logged().plot(), None,
        ValueError),
    Row("train with the optimizer that was passed to `compile`",
        lambda: fitted(GradientLogger(), custom(False)), lambda: fitted(GradientLogger(), custom(True)), None,
        ValueError),
]  # fmt: skip


def test_the_fixes_of_errors_of_the_gradient_logger():
    check(CALLBACKS, ["callbacks"], {"training_of": "a backend that Keras does not have"})


def traced(*layers, inside=False, number=1):
    with multigrad.trace_gradients(*layers) as trace:
        grad(total)(X)
    trace.plot([number])
    return trace


def opening(inside):
    def f(x):
        if not inside:
            return total(x)
        with multigrad.trace_gradients():
            return total(x)

    f = multigrad.jit(f)
    if inside:
        return f(array(X))
    with multigrad.trace_gradients() as trace:
        value = f(array(X))
    assert len(trace.calls) == 1
    return value


TRACES = [
    Row("call trace_gradients(model). Ops are always recorded", lambda: traced(tripled), lambda: traced()),
    Row("print the trace, which lists the calls", lambda: traced(number=7), lambda: print(traced(number=1)),
        None, ValueError),
    Row("pass the function itself", lambda: multigrad.jit(3.0),
        lambda: multigrad.jit(grad(total))(array(1.0)), 3.0),
    Row("write the name as in the signature",
        lambda: multigrad.jit(lambda x, n: tripled(x) * n, static_argnames="m"),
        lambda: multigrad.jit(grad(lambda x, n: tripled(x) * n), static_argnames="n")(array(1.0), n=2), 6.0),
]  # fmt: skip

if BACKEND != "torch":  # Dynamo opens the trace outside of its graphs
    TRACES += [
        Row("open the trace around the call of the compiled function", lambda: opening(True),
            lambda: opening(False), 6.0, RuntimeError),
    ]  # fmt: skip


@pytest.mark.slow_on("torch")  # compiles a function
def test_the_fixes_of_errors_about_traces():
    others = {"import_pyplot": "matplotlib is installed", "trace_gradients": "not on PyTorch"}
    check(TRACES, ["tracing", "compilation.py"], others)


class Mode:
    """An object that cannot be saved."""


def factor(n):
    return op_custom_gradient(name="fixes>factor")(make_factor(n))


def make_factor(n):
    def f(x):
        return x * n, lambda upstream: upstream * 7.0

    return f


def saved(op, *args):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, op(inputs, *args))
    loaded = keras.models.model_from_json(model.to_json())
    return grad(lambda x: ops.sum(loaded(x)))(array(PAIR))


@op_custom_gradient(name="fixes>moded")
def moded(x, mode):
    return x * 1.0, lambda upstream: upstream * 7.0


@op_custom_gradient
def unnamed(x):
    return x * 1.0, lambda upstream: upstream * 7.0


named = op_custom_gradient(name="my_package>unnamed")(unnamed.__wrapped__)


def read_config(op="fixes>moded", argument=None):
    """Read the config of a node, as Keras does when it loads a model."""
    config = {"call": {"op": op, "args": [argument or {"input": 0}, "mode"], "kwargs": {}}}
    return Application.from_config(config)


SAVED = [
    Row("write name='my_package>my_op'", lambda: op_custom_gradient(lambda x: x, name="a>b>c"),
        lambda: op_custom_gradient(lambda x: x, name="fixes>b"), None, ValueError),
    Row("pass the values that the function closes over as arguments", lambda: (factor(2.0), factor(3.0)),
        lambda: grad(op_custom_gradient(make_factor(3.0)))(1.0), 7.0, ValueError),
    Row("rename or omit one of them", lambda: op_custom_gradient(lambda x, y: x, name="fixes>moded"),
        lambda: op_custom_gradient(lambda x, y: x, name="fixes>other"), None, ValueError),
    Row("define it with @op_custom_gradient(name='my_package>unnamed')", lambda: saved(unnamed),
        lambda: saved(named), 7.0 * PAIR, NotImplementedError),
    Row("such as the name of an object", lambda: saved(moded, Mode()), lambda: saved(moded, "mode"),
        7.0 * PAIR, NotImplementedError),
    Row("define it with @op_custom_gradient(name='fixes>gone'), or import its module",
        lambda: read_config(op="fixes>gone"), lambda: read_config()),
    Row("if the file was changed, save the model again", lambda: read_config(argument={"inputs": 0}),
        lambda: read_config(), None, ValueError),
]  # fmt: skip


def test_the_fixes_of_errors_about_saved_models():
    check(SAVED, ["keras_graph"], {"_require_trained": "Keras adds the class of the tensors"})
