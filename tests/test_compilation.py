"""`multigrad.jit`: compiled functions that read and assign Keras Variables."""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close, numpy, seven

from multigrad import grad, jit, jvp, trace_gradients, value_and_grad, vmap

# Inductor takes several seconds per program.
FAST = {"backend": "eager"} if BACKEND == "torch" else {}


def compiled(function=None, **options):
    return jit(function, **FAST, **options)


class Batches:
    """A small problem with inputs, labels, a model and an optimizer."""

    def __init__(self, optimizer="adam", built=True):
        keras.utils.set_random_seed(7)
        self.x = array(np.random.default_rng(7).normal(size=(32, 3)))
        self.y = self.x @ array([[1.0], [-2.0], [0.5]])
        dense = keras.layers.Dense
        self.model = keras.Sequential([keras.Input((3,)), dense(8, activation="tanh"), dense(1)])
        self.optimizer = keras.optimizers.get(optimizer)
        if built:
            self.optimizer.build(self.model.trainable_variables)

    def step(self, x, y):
        def loss():
            return ops.mean((self.model(x, training=True) - y) ** 2)

        weights = self.model.trainable_variables
        value, gradients = value_and_grad(loss, variables=weights)()
        self.optimizer.apply(gradients, weights)
        return value


# ------------------------------------------------------------------------------- variables


@pytest.mark.forward
def test_reads_and_assignments():
    count = keras.Variable(0.0, trainable=False)
    factor = keras.Variable(2.0)

    @compiled
    def f(x):
        count.assign_add(1.0)
        return x * factor + count

    close([f(array(1.0)), f(array(1.0))], [array(3.0), array(4.0)])
    factor.assign(10.0)
    close(f(array(1.0)), array(13.0))
    assert numpy(count) == 3.0


@pytest.mark.parametrize(
    ("optimizer", "built"),
    [
        pytest.param("sgd", True, marks=pytest.mark.slow),
        ("adam", True),
        pytest.param("adam", False, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_equals_the_eager_step(optimizer, built):
    eager, whole = Batches(optimizer, built), Batches(optimizer, built)
    step = compiled(whole.step)
    for _ in range(4):
        close(step(whole.x, whole.y), eager.step(eager.x, eager.y))
    for ours, theirs in (whole.model, eager.model), (whole.optimizer, eager.optimizer):
        close([v.value for v in ours.variables], [v.value for v in theirs.variables])


@pytest.mark.slow_on("torch")
def test_a_step_is_traced_again_when_a_weight_is_frozen():
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    layers[0].build((1, 2)), layers[1].build((1, 1))
    traces, x = [], array([[1.0, 2.0]])

    @compiled
    def step(x):
        traces.append(1)
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        gradients = grad(lambda: ops.sum(seven(x @ layers[0].kernel) @ layers[1].kernel), variables=weights)()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(gradient)

    first, second = np.ones((2, 1), "float32"), np.ones((1, 1), "float32")
    for frozen in (None, 0, None, 1):
        for index, layer in enumerate(layers):
            layer.trainable = index != frozen
        step(x)
        of_first, of_second = 7.0 * numpy(x).T @ second, numpy(x) @ first
        first, second = first - of_first * (frozen != 0), second - of_second * (frozen != 1)
        close([layer.kernel.value for layer in layers], [first, second])
    assert BACKEND == "torch" or len(traces) <= {"jax": 6, "tensorflow": 3}[BACKEND]


@pytest.mark.slow_on("torch")
def test_seed_generators_advance():
    seeds = keras.random.SeedGenerator(3)
    dropout = keras.layers.Dropout(0.5, seed=4)

    @compiled
    def f(x):
        return keras.random.normal((4,), seed=seeds), dropout(x, training=True)

    draws = [f(np.ones(64, "float32")) for _ in range(3)]
    assert len({numpy(normal).tobytes() for normal, _ in draws}) == 3
    assert len({numpy(dropped).tobytes() for _, dropped in draws}) == 3
    again = keras.random.SeedGenerator(3)
    close([normal for normal, _ in draws], [keras.random.normal((4,), seed=again) for _ in range(3)])


@pytest.mark.forward
def test_layers_that_are_built_in_the_first_call():
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.Adam(0.1)

    @compiled
    def f(x):
        y = model(x)
        optimizer.apply([ops.ones(w.shape) for w in model.trainable_variables], model.trainable_variables)
        return y

    x = np.ones((2, 3), "float32")
    first, second = f(x), f(x)
    close(first, array([[3.0], [3.0]]))
    assert (numpy(second) < 3.0).all()
    assert numpy(optimizer.iterations) == 2
    close(model.weights[1], array([-0.2]), 1e-4)


@pytest.mark.forward
def test_an_exception_in_the_trace_does_not_change_the_variables():
    v = keras.Variable(1.0)

    @compiled
    def f(x):
        v.assign_add(x)
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        f(array(1.0))
    if BACKEND not in ("jax", "tensorflow"):  # elsewhere the function runs uncompiled up to the exception
        return
    assert numpy(v) == 1.0
    close(v + 1.0, array(2.0))


def test_losses_of_layers():
    layer = keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.5), kernel_regularizer="l2")
    layer.build((None, 2))

    @compiled
    def f(x):
        layer(x)
        return sum(layer.losses)

    x = np.ones((1, 2), "float32")
    got = [f(x), f(x)]
    layer(x)
    close(got, [sum(layer.losses)] * 2)


# ------------------------------------------------------------------------------- arguments


@pytest.mark.forward
def test_structures_keywords_and_numbers():
    f = compiled(lambda tree, k=2.0, *, flag=None: {"y": [tree["a"] * k, tree["b"][0] + 1], "none": flag})
    got = f({"a": array(3.0), "b": (array(1, dtype="int32"),)}, k=4.0)
    assert got["none"] is None
    close(got["y"], [array(12.0), array(2, dtype="int32")])
    close(f({"a": np.float32(3.0), "b": (np.int32(1),)})["y"][0], array(6.0))


class Foreign:
    """An array that no framework knows."""

    def __init__(self, values):
        self.values = np.array(values, "float32")

    def __array__(self, dtype=None, copy=None):
        if len(self.values) > 2:
            raise BufferError("on another device")
        return self.values


def test_arrays_of_other_frameworks_are_converted():
    """Not static objects, which are known by their identity: one that changed in place would be stale."""
    traces, batch = [], Foreign([1.0, 2.0])

    @compiled
    def f(x, y):
        traces.append(1)
        return grad(lambda x: ops.sum(seven(x) * y["y"]))(x)

    close(f(batch, {"y": Foreign([3.0, 5.0])}), array(21.0, 35.0))
    traces_before, batch.values[0] = len(traces), 4.0
    close(f(Foreign([1.0, 1.0]), {"y": batch}), array(28.0, 14.0))
    assert BACKEND == "torch" or len(traces) == traces_before
    close(grad(lambda x: ops.sum(seven(x)))(batch), array(7.0, 7.0))
    close(grad(lambda x, y: ops.sum(seven(x) * y))(ops.ones(2), batch), array(28.0, 14.0))
    close(vmap(grad(seven))(batch), array(7.0, 7.0))
    close(vmap(lambda x, y: seven(x) * y, (0, None))(ops.ones(1), batch), array([[4.0, 2.0]]))
    close(jvp(seven, (batch,), (batch,)), (array(4.0, 2.0), array(28.0, 14.0)))
    output = seven({"x": [batch]}["x"][0])
    batch.values[0] = 9.0
    close(output, array(4.0, 2.0))
    for program in (seven, grad(lambda x: ops.sum(seven(x))), vmap(seven), lambda x: f(x, {"y": batch})):
        with pytest.raises(TypeError, match=r"(?s)cannot be converted.*fix: pass a NumPy array"):
            program(Foreign([1.0, 2.0, 3.0]))


@pytest.mark.forward
def test_static_arguments():
    traces = []

    @compiled(static_argnames=("n", "training"))
    def f(x, n, training=False):
        traces.append(n)
        return ops.tile(x, n) * (2.0 if training else 1.0)

    x = array([1.0, 2.0])
    assert numpy(f(x, 2)).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert numpy(f(x, n=1, training=True)).tolist() == [2.0, 4.0]
    before = len(traces)
    f(x, 2), f(x, n=1, training=True)
    assert BACKEND not in ("jax", "tensorflow") or len(traces) == before
    close(f(array([[1.0]]), 1), array([[1.0]]))
    single = compiled(lambda x, mode: x if mode == "same" else -x, static_argnames="mode")
    close([single(array(1.0), "same"), single(array(1.0), mode="other")], [array(1.0), array(-1.0)])


@pytest.mark.forward
def test_a_method_is_compiled_for_each_object():
    class Scale(keras.layers.Layer):
        def __init__(self, factor):
            super().__init__()
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.factor = factor

        @jit(**FAST)
        def scaled(self, x):
            """Scale."""
            self.calls.assign_add(1.0)
            return x * self.factor

    two, three = Scale(2.0), Scale(3.0)
    close([two.scaled(array(1.0)), three.scaled(array(1.0)), two.scaled(array(2.0))], [2.0, 3.0, 4.0])
    assert [numpy(two.calls), numpy(three.calls)] == [2.0, 1.0]
    assert Scale.scaled.__doc__ == "Scale."


@pytest.mark.forward
def test_a_model_and_a_partial():
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    layer.build((None, 2))
    close(compiled(layer)(np.ones((1, 2), "float32")), array([[2.0]]))
    close(compiled(functools.partial(lambda a, b: a - b, b=1.0))(array(3.0)), array(2.0))


# ------------------------------------------------------------------------------- within others


@pytest.mark.forward
def test_nested():
    v = keras.Variable(1.0, trainable=False)

    @compiled
    def inner(x):
        v.assign_add(x)
        return v * 2.0

    @compiled
    def outer(x):
        before = v.value * 1.0
        return before, inner(x), inner(x), v * 1.0

    close(outer(array(1.0)), tuple(array(n) for n in (1.0, 4.0, 6.0, 3.0)))
    close(outer(array(1.0)), tuple(array(n) for n in (3.0, 8.0, 10.0, 5.0)))
    assert numpy(v) == 5.0


def test_derivatives_of_a_compiled_function():
    w = keras.Variable(3.0)
    f = compiled(lambda x: seven(x) * w)
    close(grad(f)(2.0), array(21.0))
    close(grad(f, variables=[w])(2.0), [array(2.0)])
    if BACKEND != "torch":  # Dynamo (PyTorch 2.13) does not compile second derivatives
        close(grad(grad(compiled(lambda x: seven(x) * x)))(2.0), array(14.0))
        close(compiled(lambda x: jvp(lambda x: x**3, (x,), (1.0,)))(array(2.0)), (array(8.0), array(12.0)))


def test_in_a_trace_the_function_runs_uncompiled_and_once():
    v = keras.Variable(0.0, trainable=False)

    @compiled
    def f(x):
        v.assign_add(1.0)
        return grad(seven)(x)

    f(array(2.0))
    with trace_gradients() as trace:
        f(array(2.0))
    assert (len(trace.calls), len(trace.steps)) == (1, 1)
    assert numpy(v) == 2.0
