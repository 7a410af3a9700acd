"""The errors of `multigrad.ops` and `multigrad.layers`: each fix works."""

import types

import keras
import numpy as np
import pytest
from fixing import Row, check
from support import array

from multigrad import grad, layers, op_custom_gradient, ops

X = np.ones(3, "float32")
PAIR = np.ones((2, 3), "float32")
DIAGONAL = np.diag([1.0, 2.0]).astype("float32")
TWO = array(2.0)
COUNT = keras.KerasTensor((3,), "float32")


def slope(f, x=X):
    """Return the gradient of the sum of `f(x)`."""
    return grad(lambda x: keras.ops.sum(f(x)))(x)


def host(result, output=COUNT):
    """Call a host function in an op with the false factor 7."""

    @op_custom_gradient
    def op(x):
        return ops.host_call(lambda x: result(x), x, output=output), lambda upstream: upstream * 7.0

    return slope(op)


def unknown_size(output):
    return host(lambda x: x, output)


def loss_of(features=PAIR, kernel=None, labels=(0, 1), **options):
    kernel = np.ones((3, 4), "float32") if kernel is None else kernel
    labels = labels if hasattr(labels, "dtype") else np.array(labels, "int32")
    return ops.linear_cross_entropy(features, kernel, labels, **options)


LOSSES = [
    Row("leave it out for one loss per token", lambda: loss_of(reduction="max"), lambda: loss_of().shape,
        None, ValueError),
    Row("write 0.1, for example", lambda: loss_of(label_smoothing=2.0), lambda: loss_of(label_smoothing=0.1),
        None, ValueError),
    Row("write ignore_index=-100, for example", lambda: loss_of(ignore_index=0.5),
        lambda: loss_of(ignore_index=-100)),
    Row("pass ignore_index=-100, or another label", lambda: loss_of(labels=(0, -100)),
        lambda: slope(lambda x: loss_of(x, labels=(0, -100), ignore_index=-100), PAIR)[1], 0.0 * X,
        ValueError),
    Row("pass one column per class", lambda: loss_of(kernel=X), lambda: loss_of(kernel=PAIR.T), None,
        ValueError),
    Row("pass one row per token, and the kernel as (d, classes)",
        lambda: loss_of(kernel=np.ones((4, 3), "float32")),
        lambda: loss_of(kernel=np.ones((3, 4), "float32")), None, ValueError),
    Row("round them", lambda: loss_of(labels=np.float32([0.5, 1.0])),
        lambda: loss_of(labels=np.float32([0.0, 1.0]))),
    Row("cast them to int32", lambda: loss_of(labels=np.array([True, False])),
        lambda: loss_of(labels=(1, 0))),
    Row("cast it", lambda: loss_of(PAIR.astype("int32")), lambda: loss_of(PAIR)),
    Row("take its real part", lambda: loss_of(sample_weight=np.ones(2, "complex64")),
        lambda: loss_of(sample_weight=np.ones(2, "complex64").real)),
    Row("pass one class per token", lambda: loss_of(labels=(0, 1, 2)), lambda: loss_of(), None, ValueError),
    Row("pass one number per class, or None", lambda: loss_of(bias=X),
        lambda: loss_of(bias=np.ones(4, "float32")), None, ValueError),
]  # fmt: skip

ROUTING = [
    Row("pass keras.ops.stack(...) of them", lambda: ops.log1pexp([array(1.0), array(2.0)]),
        lambda: ops.log1pexp(keras.ops.stack([array(1.0), array(2.0)]))),
    Row("a tensor, or numbers", lambda: ops.log1pexp("text"), lambda: ops.log1pexp(1.0)),
    Row("cast it", lambda: ops.round_straight_through([1, 2]), lambda: slope(ops.round_straight_through), X),
    Row("count from 0, or from -1 at the end", lambda: ops.clip_gradient(X, norm=1.0, axis=2),
        lambda: slope(lambda x: ops.clip_gradient(x, norm=1.0, axis=-1)), X / np.sqrt(3.0), ValueError),
    Row("the absolute value", lambda: ops.logcosh(1j), lambda: ops.logcosh(abs(1j))),
    Row("write clip_gradient(x, norm=1.0)", lambda: ops.clip_gradient(X),
        lambda: slope(lambda x: ops.clip_gradient(x, norm=1.0)), X / np.sqrt(3.0), ValueError),
    Row("clip the gradients of the real and imaginary parts", lambda: ops.clip_gradient(X * 1j, norm=1.0),
        lambda: slope(lambda x: ops.clip_gradient(x, norm=1.0)), X / np.sqrt(3.0)),
    Row("pass a comparison, for example `condition > 0`", lambda: ops.stop_gradient_if(X, X),
        lambda: slope(lambda x: ops.stop_gradient_if(X > 0.0, x)), 0.0 * X),
    Row("pass its real part", lambda: ops.scale_gradient(X, 3j),
        lambda: slope(lambda x: ops.scale_gradient(x, (3.0 + 3j).real)), 3.0 * X),
    Row("reshape it to a shape that broadcasts", lambda: ops.scale_gradient(PAIR, np.float32([3.0, 5.0])),
        lambda: slope(lambda x: ops.scale_gradient(x, np.float32([[3.0], [5.0]])), PAIR),
        [[3.0], [5.0]] * PAIR, ValueError),
    Row("use keras.ops.stop_gradient for a gradient of zero", lambda: slope(ops.prevent_gradient),
        lambda: slope(lambda x: keras.ops.stop_gradient(x) + 3.0 * x), 3.0 * X, RuntimeError),
    Row('write "arctan", for example', lambda: ops.spike(X, "tan"), lambda: ops.spike(X, "arctan"), X,
        ValueError),
    Row("write slope=2.0, for example", lambda: ops.spike(X, slope=-1.0), lambda: ops.spike(X, slope=2.0), X,
        ValueError),
    Row("write limit=1.0, for example", lambda: ops.sign_straight_through(X, limit=-1.0),
        lambda: slope(lambda x: ops.sign_straight_through(x, limit=1.0)), X, ValueError),
    Row("pass the smaller one first", lambda: ops.clip_straight_through(X, 1.0, 0.0),
        lambda: slope(lambda x: ops.clip_straight_through(x, 0.0, 0.5)), X, ValueError),
    Row("pass step=0.1, for example", lambda: ops.fake_quantize(X, 0.0), lambda: ops.fake_quantize(X, 0.1), X,
        ValueError),
    Row("pass bits=8, for example", lambda: ops.fake_quantize(X, 0.1, bits=1),
        lambda: ops.fake_quantize(X, 0.1, bits=8), X, ValueError),
    Row("cast the output in the function: keras.ops.cast(..., x.dtype)",
        lambda: ops.straight_through(lambda x: x > 0.0)(X),
        lambda: slope(ops.straight_through(lambda x: keras.ops.cast(x > 0.0, x.dtype))), X),
    Row("change the shape outside of straight_through", lambda: ops.straight_through(keras.ops.sum)(X),
        lambda: slope(lambda x: keras.ops.sum(ops.straight_through(keras.ops.round)(x))), X, ValueError),
    Row("cast it", lambda: ops.vector_quantize(PAIR.astype("int32"), PAIR),
        lambda: ops.vector_quantize(PAIR, PAIR)),
    Row("pass one row per vector", lambda: ops.vector_quantize(PAIR, X),
        lambda: ops.vector_quantize(PAIR, X[None]), None, ValueError),
    Row("move the vectors to the last axis", lambda: ops.vector_quantize(PAIR.T, PAIR),
        lambda: ops.vector_quantize(PAIR, PAIR), None, ValueError),
    Row("multiply the loss by the tensor instead", lambda: ops.vector_quantize(PAIR, PAIR, array(0.25)),
        lambda: ops.vector_quantize(PAIR, PAIR).loss * array(0.25)),
    Row("write commitment=0.25, for example", lambda: ops.vector_quantize(PAIR, PAIR, -1.0),
        lambda: ops.vector_quantize(PAIR, PAIR, commitment=0.25), None, ValueError),
]  # fmt: skip


def test_the_fixes_of_errors_of_losses():
    check(LOSSES, ["ops/vocabulary/linear_cross_entropy.py"], {})


def test_the_fixes_of_errors_of_gradient_routing():
    check(ROUTING, ["ops/arguments.py", "ops/gradient", "ops/stable.py"], {})


def spectral(x, fn, *others):
    return keras.ops.sum(ops.spectral_function(x, fn, *others))


def halved(z, x):
    return 0.5 * z + x


def solved(f=halved, z0=0.0, **options):
    return grad(lambda x: ops.fixed_point(f, z0, x, **options))(3.0)


def square(z, x):
    return z * z - x


def root(solver=None, f=square, z0=2.0, **options):
    return grad(lambda x: ops.implicit_root(f, z0, x, solver=solver, **options))(4.0)


def equation(f=None, b=X, **options):
    return slope(lambda b: ops.linear_solve(f or (lambda x: 2.0 * x), b, **options), b)


def assigning(counter, inside):
    def f(z, x):
        if inside:
            counter.assign_add(1.0)
        return halved(z, x)

    return solved(f)


def second(is_hidden):
    def f(x):
        held = types.SimpleNamespace(x=x)
        if is_hidden:
            return ops.fixed_point(lambda z: 0.5 * z + held.x**2, 0.0)
        return ops.fixed_point(lambda z, x: 0.5 * z + x**2, 0.0, x)

    return grad(grad(f))(3.0)


SOLVERS = [
    Row("pass the function itself", lambda: solved(3.0), lambda: solved(), 2.0),
    Row("pass the function itself", lambda: root(f=3.0), lambda: root(), 0.25),
    Row("pass the function itself", lambda: root(solver=3.0), lambda: root(solver=lambda f, z0, x: x**0.5),
        0.25),
    Row("pass the function itself", lambda: ops.linear_solve(3.0, X), lambda: equation(), 0.5 * X),
    Row("pass the function itself", lambda: ops.implicit_argmin(3.0, 1.0),
        lambda: grad(lambda a: ops.implicit_argmin(lambda x, a: (x - 3.0 * a) ** 2, 0.0, a))(1.0), 3.0),
    Row("pass the function itself", lambda: ops.implicit_argmin(halved, 1.0, solver=3.0),
        lambda: ops.implicit_argmin(lambda x: (x - 1.0) ** 2, 0.0, solver=lambda f, x0: x0 + 1.0), 1.0),
    Row("pass floats", lambda: solved(z0=0), lambda: solved(z0=0.0), 2.0),
    Row("draw random numbers outside of the function", lambda: assigning(keras.Variable(0.0), True),
        lambda: assigning(keras.Variable(0.0), False), 2.0),
    Row("return the same structure from it", lambda: solved(lambda z, x: [z, x]), lambda: solved(), 2.0),
    Row("return the same type from it", lambda: solved(lambda z, x: None), lambda: solved(), 2.0),
    Row("return the same dtype from it", lambda: solved(lambda z, x: keras.ops.cast(halved(z, x), "float16")),
        lambda: solved(), 2.0),
    Row("return the same shape from it", lambda: solved(lambda z, x: keras.ops.stack([z, x])),
        lambda: solved(), 2.0, ValueError),
    Row("make the function a contraction", lambda: solved(lambda z, x: 2.0 * z + x), lambda: solved(), 2.0,
        RuntimeError),
    Row("pass one, or leave it out", lambda: solved(tolerance=-1.0), lambda: solved(tolerance=1e-4), 2.0,
        ValueError),
    Row("pass one, or leave it out", lambda: solved(max_iterations=0), lambda: solved(max_iterations=500),
        2.0, ValueError),
    Row("pass one, or leave it out", lambda: solved(on_failure="none"), lambda: solved(on_failure="nan"), 2.0,
        ValueError),
    Row("pass one, or leave it out", lambda: equation(solver="lu"), lambda: equation(solver="cg"), 0.5 * X,
        ValueError),
    Row("run the solver for more iterations", lambda: root(solver=lambda f, z0, x: z0 + 1.0),
        lambda: root(solver=lambda f, z0, x: x**0.5), 0.25, RuntimeError),
    Row("argument: 'b'", lambda: ops.linear_solve(halved, np.ones(3, "int32")), lambda: equation(b=X),
        0.5 * X),
    Row("pass a `b` like the result of the function", lambda: equation(lambda x: x[:2]), lambda: equation(),
        0.5 * X, ValueError),
    Row("choose another linear solver (cg needs a symmetric matrix), or allow a larger tolerance",
        lambda: equation(lambda x: 0.0 * x, solver="cg"), lambda: equation(solver="gmres"), 0.5 * X,
        RuntimeError),
    Row("return zero for x = 0 and twice the result for twice x",
        lambda: equation(lambda x: 2.0 * x + 1.0, 9.0 * X, solver="gmres"),
        lambda: equation(lambda x: 2.0 * x, 9.0 * X, solver="gmres"), 0.5 * X, RuntimeError),
    Row("or use implicit_root", lambda: equation(lambda x: 2.0 * x + 1.0, 9.0 * X, solver="gmres"),
        lambda: root(f=lambda z, x: 2.0 * z + 1.0 - x), 0.5, RuntimeError),
    Row("solve for the real and imaginary parts", lambda: equation(b=X * 1j, solver="gmres"),
        lambda: equation(b=X, solver="gmres"), 0.5 * X),
    Row("add the axis, or omit batched=True", lambda: solved(batched=True),
        lambda: ops.fixed_point(halved, 0.0 * X, X, batched=True), 2.0 * X, ValueError),
    Row("start where the matrix has an inverse", lambda: root(z0=0.0), lambda: root(), 0.25, RuntimeError),
    Row("use float64, or allow a larger tolerance", lambda: equation(lambda x: 0.0 * x), lambda: equation(),
        0.5 * X, RuntimeError),
    Row("pass the tensor as an argument", lambda: second(True), lambda: second(False), 4.0, RuntimeError),
]  # fmt: skip


# Each solution of an equation is compiled separately.
@pytest.mark.slow
def test_the_fixes_of_errors_of_solvers():
    check(SOLVERS, ["ops/implicit"], {"solve_by": "in compiled functions and vmap only"})


CALLS = [
    Row("pass the function itself", lambda: ops.host_call(3.0, X, output=X), lambda: host(lambda x: x),
        7.0 * X),
    Row("write output=x for an argument x", lambda: host(lambda x: x, "float32"),
        lambda: host(lambda x: x, X), 7.0 * X),
    Row('output=keras.KerasTensor((3,), "float32")', lambda: host(lambda x: x, "float32"),
        lambda: host(lambda x: x, keras.KerasTensor((3,), "float32")), 7.0 * X),
    Row("call it in a function that op_custom_gradient decorates",
        lambda: slope(lambda x: ops.host_call(np.cos, x, output=x)), lambda: host(np.cos), 7.0 * X),
    Row("or on keras.ops.stop_gradient(x)", lambda: slope(lambda x: ops.host_call(np.cos, x, output=x)),
        lambda: slope(lambda x: 3.0 * x + ops.host_call(np.cos, keras.ops.stop_gradient(x), output=x)),
        3.0 * X),
    Row("pass a function of the arguments' specs",
        lambda: unknown_size(keras.KerasTensor((None,), "float32")),
        lambda: unknown_size(lambda x: keras.KerasTensor((x.shape[0],), x.dtype)), 7.0 * X, ValueError),
    Row("convert it, as in `np.asarray(y, 'float32')`", lambda: host(lambda x: x.astype("float64")),
        lambda: host(lambda x: np.asarray(x.astype("float64"), "float32")), 7.0 * X),
    Row("return an array of this shape, or change `output`", lambda: host(lambda x: x[:2]),
        lambda: host(lambda x: x), 7.0 * X, ValueError),
    Row("return the structure of `output`", lambda: host(lambda x: [x, x]), lambda: host(lambda x: x),
        7.0 * X),
    Row("pass the scalar as a further argument", lambda: spectral(DIAGONAL, lambda x, t=TWO: x**t),
        lambda: grad(spectral)(DIAGONAL, lambda x, t: x**t, 2.0), np.array([[2.0, 3.0], [3.0, 4.0]])),
    Row("pass the function itself", lambda: spectral(DIAGONAL, 3.0),
        lambda: spectral(DIAGONAL, lambda x: x**2), 5.0),
    Row("pass one tensor for each scalar", lambda: spectral(DIAGONAL, lambda x, t: x * t[0] ** t[1], X),
        lambda: spectral(DIAGONAL, lambda x, s, t: x * s**t, 1.0, 1.0), 3.0, ValueError),
    Row("cast it", lambda: spectral(DIAGONAL.astype("int32"), lambda x: x),
        lambda: spectral(DIAGONAL, lambda x: x), 3.0),
]  # fmt: skip


def test_the_fixes_of_errors_of_host_calls_and_matrix_functions():
    check(CALLS, ["ops/host_call.py", "ops/spectral.py"], {})


def embedding():
    return keras.layers.Embedding(4, 3)


class Wide(keras.layers.Layer):
    """A cell with an output of size 5."""

    def call(self, inputs):
        x = inputs[1]
        return 0.5 * keras.ops.ones_like(x[:, :1]) * keras.ops.ones((1, 5), x.dtype)


def adapted(layer, data):
    layer.adapt(data)
    return layer.step


LAYERS = [
    Row("write the cell as a layer", lambda: layers.FixedPoint(halved),
        lambda: layers.FixedPoint(Wide(), (5,))(PAIR)),
    Row("pass the shape of the cell's output", lambda: layers.FixedPoint(Wide())(PAIR),
        lambda: layers.FixedPoint(Wide(), (5,))(PAIR), 0.5 * np.ones((2, 5)), ValueError),
    Row("pass the layer, not its weight", lambda: layers.LinearCrossEntropy(embedding=array(PAIR)),
        lambda: layers.LinearCrossEntropy(embedding=embedding())(PAIR)),
    Row("or pass an embedding", lambda: layers.LinearCrossEntropy(), lambda: layers.LinearCrossEntropy(32000),
        None, ValueError),
    Row("call multigrad.ops.linear_cross_entropy", lambda: layers.LinearCrossEntropy(4, reduction="none"),
        lambda: loss_of(reduction="none"), None, ValueError),
    Row("project the features to the width of the embedding",
        lambda: layers.LinearCrossEntropy(embedding=embedding())(PAIR[:, :2]),
        lambda: layers.LinearCrossEntropy(embedding=embedding())(keras.layers.Dense(3)(PAIR[:, :2])), None,
        ValueError),
    Row("pass axis=-1 for the last axis", lambda: layers.FakeQuantize(axis=0.5),
        lambda: layers.FakeQuantize(axis=-1)(PAIR)),
    Row("leave it out, and call `adapt` with data", lambda: layers.FakeQuantize(step=-1.0),
        lambda: adapted(layers.FakeQuantize(), PAIR), None, ValueError),
    Row("or None for one step for all", lambda: layers.FakeQuantize(axis=2)(PAIR),
        lambda: layers.FakeQuantize(axis=None)(PAIR), None, ValueError),
    Row("pass typical inputs, and remove channels that are always zero",
        lambda: adapted(layers.FakeQuantize(), 0.0 * X), lambda: adapted(layers.FakeQuantize(), X), None,
        ValueError),
    Row("write VectorQuantizer(512), for example", lambda: layers.VectorQuantizer(0),
        lambda: layers.VectorQuantizer(512)(PAIR), None, ValueError),
    Row("call the layer first, or build it", lambda: layers.VectorQuantizer(4).vectors([0]),
        lambda: built(layers.VectorQuantizer(4)).vectors([0]), None, ValueError),
    Row("assign later values to the weight `scale`", lambda: layers.GradientScale(array(3.0)),
        lambda: assigned(layers.GradientScale(2.0), 3.0), 3.0 * X),
]  # fmt: skip


def built(layer):
    layer.build((None, 3))
    return layer


def assigned(layer, scale):
    layer.scale.assign(scale)
    return slope(layer)


def test_the_fixes_of_errors_of_layers():
    check(LAYERS, ["layers"], {})
