"""Trainable variables that a function reads and does not get as arguments."""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, FIT_MODES, array, close, compiled, compiled_with_variables, numpy

from multigrad import grad, op_custom_gradient, value_and_grad, vjp

SCALE = keras.Variable([2.0, 3.0], name="scale")


def native_gradients(function, variables, *tensors):
    """Return the gradients of `function(*tensors)` by the backend's own gradient function."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = function(*tensors)
        return tape.gradient(value, [v.value for v in variables])
    if BACKEND == "torch":
        import torch

        return list(torch.autograd.grad(function(*tensors), [v.value for v in variables]))
    import jax

    def stateless(values):
        with keras.StatelessScope(zip(variables, values, strict=True)):
            return function(*tensors)

    return jax.grad(stateless)([v.value for v in variables])


FORMS = {
    "whole": lambda u, variables: (u, [v * 0 + 7.0 for v in variables]),
    "keyword only": lambda u, *, variables: (u, [7.0]),
    "default": lambda u, variables=None: (u, [7.0]),
    "any keywords": lambda u, **others: (u, [7.0 * len(others["variables"])]),
    "flat": lambda *us, variables: (us[0], (7.0,)),
    "hybrid": lambda x, upstream=None, variables=None: (upstream, [7.0]),
    "alone": lambda u, variables: (u, array(7.0)),
    "lazy": lambda u, variables: (u, [lambda: array(7.0)]),
    "partial": functools.partial(lambda factor, u, variables: (u, [factor]), 7.0),
}


@pytest.mark.parametrize("rule", FORMS.values(), ids=FORMS)
def test_every_form_of_a_rule_takes_variables(rule):
    weight = keras.Variable(2.0)
    op = op_custom_gradient(lambda x: (x * weight, rule))
    close(grad(op, 0, variables=[weight])(3.0), (1.0, [7.0]))
    close(native_gradients(op, [weight], array(3.0)), [array(7.0)])


def test_an_op_without_arguments():
    op = op_custom_gradient(lambda: (SCALE * 2, lambda u, variables: ((), [u * 7])))
    close(native_gradients(lambda: ops.sum(op()), [SCALE]), [array(7.0, 7.0)])


def test_an_argument_and_a_weight_that_are_the_same_variable():
    weight = keras.Variable(2.0)
    op = op_custom_gradient(lambda x: (x * weight, lambda u, variables: (u * 3, [u * 7])))
    close(native_gradients(lambda: op(weight), [weight]), [array(10.0)])


def test_frozen_variables_have_no_gradient():
    layer = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)
    layer.build((None, 2))

    @op_custom_gradient
    def op(x):
        def rule(upstream, variables):
            assert variables == []
            return ops.ones((1, 2)) * 7, []

        return layer(x), rule

    x = np.ones((1, 2), "float32")
    close(grad(lambda x: ops.sum(op(x)))(x), x * 7)


def test_a_rule_runs_after_the_scope_of_its_values_has_ended():
    """A variable that only the rule reads has its value from the scope, too."""
    weight, other = keras.Variable(100.0), keras.Variable(1000.0, trainable=False)
    factor = keras.Variable(10000.0, trainable=False)

    @op_custom_gradient
    def op(x):
        return x * weight * other, lambda u, variables: (u * weight * factor, [u * weight * other])

    def stateless(x, w, o, f):
        with keras.StatelessScope([(weight, w), (other, o), (factor, f)]):
            return op(x)

    values = array(3.0), array(2.0), array(5.0), array(7.0)
    wanted = (array(30.0), (array(14.0), array(10.0)))
    close(value_and_grad(stateless, (0, 1))(*values), wanted)
    close(compiled(value_and_grad(stateless, (0, 1)))(*values), wanted)


def test_the_rule_reads_a_weight_in_the_dtype_of_the_function():
    met = []

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(), initializer="ones")

        @op_custom_gradient
        def call(self, x):
            def rule(upstream, variables):
                met.append(keras.backend.standardize_dtype(variables[0].value.dtype))
                return upstream * 3, [ops.sum(upstream) * 7]

            met.append(keras.backend.standardize_dtype(self.scale.value.dtype))
            e = x * self.scale
            return ops.exp(e) + e, rule

    layer = Scale(dtype="mixed_bfloat16")
    layer.build((None,))
    gradients = native_gradients(lambda x: ops.sum(layer(x)), [layer.scale], array(1.0, 2.0))
    assert met == ["bfloat16", "bfloat16"]
    close(gradients, [array(14.0)])


# ---------------------------------------------------------------------------------------- errors


ANSWERS = {
    "too few": (lambda u: (u, []), "the wrong number of gradients of variables(.|\n)*got: 0 in a list"),
    "too many": (lambda u: (u, [u, u, u]), "3 in a list"),
    "no pair": (lambda u: u, "a pair `gradients, gradients_of_variables`"),
    "a triple": (lambda u: (u, u, u), "a pair `gradients, gradients_of_variables`"),
    "nothing": (lambda u: None, r"write `return gradients, \[None for v in variables\]`"),
    "None": (lambda u: (u, None), "got: one entry, None"),
    "a wrong shape": (lambda u: (u, [u, ops.ones((3,))]), "argument: variable 'b'"),
    "no tensor": (lambda u: (u, [u, "x"]), "argument: variable 'b'"),
}


@pytest.mark.parametrize(("answer", "text"), ANSWERS.values(), ids=ANSWERS)
def test_wrong_answers_for_variables_raise(answer, text):
    a, b = keras.Variable(1.0, name="a"), keras.Variable(np.ones((2, 2), "float32"), name="b")
    op = op_custom_gradient(lambda x: (x * a * ops.sum(b), lambda u, variables: answer(u)), name="product")
    with pytest.raises((TypeError, ValueError), match=f"product: (.|\n)*{text}"):
        grad(op, variables=[a, b])(1.0)


@pytest.mark.parametrize("answer", [lambda u: [u, u, u], lambda u: [u], lambda u: u])
def test_gradients_of_the_variables_of_a_frozen_layer_raise(answer):
    """The error names no argument, and says why there is no variable."""
    layer = keras.layers.Dense(1, trainable=False)
    layer.build((None, 2))

    @op_custom_gradient
    def op(x):
        return layer(x), lambda u, variables: (u * ops.ones_like(x), answer(u))

    said = "op: the rule returned the wrong number of gradients of var"
    with pytest.raises(TypeError, match=rf"{said}(.|\n)*no trainable variable, as in a frozen") as error:
        grad(lambda x: ops.sum(op(x)))(array([[1.0, 2.0]]))
    assert "argument" not in str(error.value)


def test_none_in_the_pair_is_zero_for_the_arguments_only():
    """`return u, None` may be meant as two gradients of arguments, without that of the variable."""
    weight = keras.Variable(3.0, name="weight")
    answers = [lambda u: (None, [u * 7.0]), lambda u: ((u, u), None)]
    zero, wrong = [
        op_custom_gradient(lambda x, y, answer=answer: (x * y * weight, lambda u, variables: answer(u)))
        for answer in answers
    ]
    x, y = array(2.0), array(5.0)
    close(grad(zero, (0, 1), variables=[weight])(x, y), ((array(0.0), array(0.0)), [array(7.0)]))
    with pytest.raises(TypeError, match="the wrong number of gradients of variables"):
        grad(wrong, variables=[weight])(x, y)


def test_a_gradient_with_respect_to_an_integer_raises():
    counter = keras.Variable(1, dtype="int32", trainable=False, name="counter")
    with pytest.raises(TypeError, match="argument: variable 'counter'"):
        grad(lambda x: x, variables=[counter])(1.0)


# ----------------------------------------------------------------------------------- assignments


def test_assignments_persist():
    average = keras.Variable(1.0, trainable=False)

    @op_custom_gradient
    def op(x):
        average.assign(average * 0.5 + x)
        return x * average, lambda u: u * 7

    close(op(array(2.0)), array(5.0))
    close(average.value, array(2.5))
    close(grad(op)(2.0), 7.0)
    close(average.value, array(3.25))
    value, gradient = value_and_grad(lambda x: op(x) * SCALE[0], variables=[SCALE])(2.0)
    close((value, gradient, average.value), (array(14.5), [array(7.25, 0.0)], array(3.625)))


def test_a_weight_that_is_read_and_assigned_and_read():
    weight = keras.Variable(5.0)

    @op_custom_gradient
    def op(x):
        weight.assign(ops.clip(weight, 0.0, 1.0))
        return x * weight, lambda u, variables: (3.0 * u * weight, [7.0 * u])

    value, (dx, (dweight,)) = value_and_grad(op, 0, variables=[weight])(array(2.0))
    close((value, dx, dweight), (array(2.0), array(3.0), array(7.0)))
    close(weight.value, array(1.0))


def test_a_weight_that_is_assigned_and_read_or_not():
    weight = keras.Variable(1.0)

    @op_custom_gradient
    def read(x):
        weight.assign(5.0)
        return x * weight, lambda u, variables: (u * weight, [7.0 * u])

    @op_custom_gradient
    def only_assigned(x):
        weight.assign(6.0)
        return x * 2.0, lambda u: u * 7.0

    close(read(array(2.0)), array(10.0))
    close(weight.value, array(5.0))
    weight.assign(1.0)
    value, (dx, (dweight,)) = value_and_grad(read, 0, variables=[weight])(array(2.0))
    close((value, dx, dweight), (array(10.0), array(5.0), array(7.0)))
    close(grad(only_assigned)(array(2.0)), array(7.0))
    close(weight.value, array(6.0))


def test_a_weight_that_is_read_in_two_dtypes():
    weight = keras.Variable(1.001)
    seen = []

    class Read(keras.layers.Layer):
        def call(self, x):
            return x * ops.cast(weight.value, x.dtype)

    half, whole = Read(dtype="mixed_bfloat16"), Read(dtype="float32")

    @op_custom_gradient
    def op(x):
        y = ops.cast(half(x), "float32") + whole(x)

        def rule(u, variables):
            seen.append(keras.backend.standardize_dtype(weight.value.dtype))
            return u * weight, [7.0 * u]

        return y, rule

    dx, (dweight,) = grad(op, 0, variables=[weight])(array(1.0))
    close((dx, dweight), (array(1.001), array(7.0)))
    assert set(seen) == {"float32"}


def test_a_second_derivative_runs_with_the_same_state():
    """It assigns no moving average again, and draws the same random numbers."""
    average, seeds = keras.Variable(1.0, trainable=False), keras.random.SeedGenerator(3)

    @op_custom_gradient
    def op(x):
        average.assign(average * 0.5 + 1.0)
        e = ops.exp(x) * (keras.random.uniform((), seed=seeds) + average)
        return e * 2.0, lambda u: u * e * 7.0

    def restarted(f):
        seeds.state.assign([0, 3])
        average.assign(1.0)
        return f(array(0.0))

    close(restarted(grad(grad(op))), 3.5 * restarted(op))
    restarted(grad(grad(op)))
    close(average.value, array(1.5))


# ---------------------------------------------------------------------------------- in layers


class Lazy(keras.layers.Layer):
    """A layer whose rule returns lazy gradients, which read its weight."""

    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(), initializer="ones", name="w")

    @op_custom_gradient
    def call(self, x):
        return x * self.w, lambda u, variables: ((lambda: u * 7.0 * self.w), [lambda: u * 5.0 * x * self.w])


LAZY = Lazy()


@op_custom_gradient
def lazy(x):
    w = LAZY.w
    return x * w, lambda u, variables: ((lambda: u * 7.0 * w), [lambda: u * 5.0 * x * w])


@pytest.mark.parametrize("op", [lazy, LAZY, LAZY.call])
def test_lazy_gradients_read_the_values_of_the_call(op):
    """The scope around the call has ended when its gradient is computed."""
    with keras.StatelessScope([(LAZY.w, array(3.0))]):
        _, pullback = vjp(op, array(2.0))
    close(pullback(array(1.0))[0], array(21.0))


class Scaled(keras.layers.Layer):
    """A layer with a weight, an inner layer and a counter, and false gradients."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.inner = keras.layers.Dense(2, kernel_initializer="ones", name="inner")
        self.inner.build(shape)

    @op_custom_gradient
    def call(self, x):
        self.calls.assign_add(1.0)

        def rule(upstream, variables):
            sizes = {"scale": 7.0, "kernel": -3.0, "bias": 5.0}
            of_variables = [ops.ones(v.shape) * sizes[v.name] * ops.sum(upstream) for v in variables]
            return 3.0 * ops.matmul(upstream, ops.ones((2, 3))), of_variables

        return self.inner(x * self.scale), rule


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize("mode", FIT_MODES)
def test_fit_moves_the_weights_by_the_rule(mode):
    layer = Scaled()
    model = keras.Sequential([keras.layers.Rescaling(1.0), layer])  # built in `fit`
    model.compile(keras.optimizers.SGD(0.01), loss=lambda y, p: ops.sum(p), **mode)
    model.fit(np.ones((4, 3), "float32"), np.zeros((4, 2), "float32"), batch_size=4, verbose=0)
    moved = {v.name: numpy(v) - (v.name != "bias") for v in model.trainable_variables}
    # The upstream gradient is 1 for each of 4 x 2 outputs, and the learning rate 0.01.
    assert sorted(moved) == ["bias", "kernel", "scale"]
    close(moved["scale"], np.full((3,), -0.56, "float32"))
    close(moved["kernel"], np.full((3, 2), 0.24, "float32"))
    close(moved["bias"], np.full((2,), -0.4, "float32"))
    close(layer.calls.value, array(1.0))


def test_stateless_call():
    layer = Scaled()
    layer.build((None, 3))

    def loss(trainable, x):
        output, others = layer.stateless_call(trainable, [v.value for v in layer.non_trainable_variables], x)
        return ops.sum(output), others

    values = [ops.copy(v.value) for v in layer.trainable_variables]
    for gradient in (grad(loss, (0, 1), has_aux=True), compiled(grad(loss, (0, 1), has_aux=True))):
        (of_weights, of_x), others = gradient(values, array(np.ones((4, 3))))
        names = [v.name for v in layer.trainable_variables]
        got = {name: numpy(g).ravel()[0] for name, g in zip(names, of_weights, strict=True)}
        assert got == {"scale": 56.0, "kernel": -24.0, "bias": 40.0}
        close(of_x, np.full((4, 3), 6.0, "float32"))
        close(others, [array(1.0)])
    close(layer.calls.value, array(0.0))


def test_a_layer_that_is_built_in_an_op():
    layer = keras.layers.Dense(2, name="late")
    op = op_custom_gradient(lambda x: (layer(x), lambda u, variables: (u, [None, None])))
    x = array(np.ones((1, 3)))
    close(op(x), ops.matmul(x, layer.kernel))
    assert np.ptp(numpy(layer.kernel)) > 0


@pytest.mark.forward
def test_the_forward_pass_reads_and_assigns():
    weight, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)

    @op_custom_gradient
    def op(x):
        count.assign_add(1.0)
        return x * weight, lambda u, variables: (u, [u])

    close(op(array(3.0)), array(6.0))
    close(count.value, array(1.0))


@pytest.mark.parametrize("wrap", [lambda f: f, compiled_with_variables], ids=["eager", "compiled"])
@pytest.mark.parametrize("convert", [lambda v: v, ops.convert_to_tensor], ids=["itself", "converted"])
def test_a_variable_as_an_output(convert, wrap):
    @op_custom_gradient
    def op(x):
        def rule(upstream, variables):
            assert [variable.name for variable in variables] == ["scale"]
            return 7.0 * upstream[0], [5.0 * upstream[1]]

        return (x, convert(SCALE)), rule

    def loss(x):
        return sum(map(ops.sum, op(x)))

    by_x, [by_scale] = wrap(grad(loss, 0, variables=[SCALE]))(array([1.0, 1.0]))
    close(by_x, array([7.0, 7.0]))
    close(by_scale, array([5.0, 5.0]))
