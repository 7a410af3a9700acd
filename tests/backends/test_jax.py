"""Tests of JAX only."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import cube_by_intermediate as cube
from jax import export
from keras import ops
from support import close, sizes_made

from multigrad import grad, op_custom_gradient, trace_gradients
from multigrad.ops import linear_cross_entropy

X = jnp.asarray([1.0, 2.0])


def total(op):
    return lambda x: op(x).sum()


def test_forward_mode_with_integers_and_complex_numbers():
    @op_custom_gradient
    def op(z, index):
        return (z * 2j, index + 1), lambda U: (U[0] * -2j * 7.0, None)

    index = jnp.asarray([1, 2])
    z = jnp.asarray([1.0 + 1.0j, 2.0])
    (out, following), (pushed, _) = jax.jvp(lambda z: op(z, index), (z,), (jnp.ones(2, "complex64"),))
    close((out, following), (z * 2j, index + 1))
    close(pushed, 14j * jnp.ones(2, "complex64"))


def test_a_variable_as_an_argument_has_the_gradient_of_the_rule():
    variable = keras.Variable([2.0, 3.0])
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * 3.0, u * 5.0 * x)))

    def loss(value):
        with keras.StatelessScope(state_mapping=[(variable, value)]):
            return op(jnp.asarray([1.0, 10.0]), variable).sum()

    close(jax.grad(loss)(variable.value), jnp.asarray([5.0, 50.0]))


def test_closed_over_tracers_in_containers_and_functions():
    def outer(w, x):
        params = {"w": [w]}

        def helper(x):
            return x * params["w"][0]

        @op_custom_gradient
        def op(x):
            return helper(x), lambda u: u * 10.0 * params["w"][0]

        return op(x).sum()

    close(jax.jit(jax.grad(outer, 1))(3 * X, X), 30 * X)


WRAPS = pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        lambda f: lambda x: jax.vmap(f)(x[None])[0],
        lambda f: lambda x: jax.value_and_grad(f)(x)[0],
        lambda f: jax.jit(lambda x: jax.value_and_grad(f)(x)[0]),
    ],
    ids=["eager", "jit", "vmap", "grad", "jit of grad"],
)


@WRAPS
def test_tracers_that_a_function_appends_to_a_list(wrap):
    def net(x):
        seen = [x]

        @op_custom_gradient
        def op(x):
            seen.append(x**2)
            return x**3, lambda u: u * 7.0 * x

        op(x)
        return (seen[-1] * len(seen)).sum()

    close(wrap(net)(X), jnp.float32(10.0))


@WRAPS
def test_tracers_that_a_function_writes_to_a_dict(wrap):
    def net(x):
        state, both = {"mean": ops.stop_gradient(x) * 0.0}, []

        @op_custom_gradient
        def op(x):
            state["mean"] = state["mean"] * 0.5 + x
            return state["mean"] * 1.0, lambda u: u * 7.0

        both += [op(x), op(x)]
        return (state["mean"] + sum(both)).sum()

    close(wrap(net)(X), jnp.float32(3.0 * (1.5 + 1.0 + 1.5)))


@WRAPS
def test_tracers_in_an_attribute_of_a_function(wrap):
    def net(x):
        def scaled(y):
            return y * scaled.factor

        scaled.factor, scaled.calls = ops.stop_gradient(x)[1], 0

        @op_custom_gradient
        def op(x):
            scaled.calls += 1
            return scaled(x), lambda u: u * 7.0 * scaled.factor

        return op(op(x)).sum() * scaled.calls

    close(wrap(net)(X), jnp.float32(24.0))


def test_a_traced_attribute_that_only_the_rule_uses():
    class Scaled:
        @op_custom_gradient
        def op(self, x):
            return x * 1.0, lambda u: u * 7.0 * self.factor

    scaled = Scaled()

    def loss(x, factor):
        scaled.factor = factor
        return scaled.op(x)

    for wrap in (lambda f: f, jax.jit):
        close(wrap(jax.grad(loss))(3.0, 2.0), 14.0)
        close(wrap(jax.grad(lambda factor: jax.grad(loss)(3.0, factor)))(2.0), 7.0)
    with pytest.raises(TypeError, match=r"Scaled\.op: the rule reaches a tensor through an object"):
        jax.grad(loss, (0, 1))(3.0, 2.0)


def test_host_code_in_a_rule_names_the_op_in_forward_mode():
    @op_custom_gradient
    def named(x):
        return x * 2.0, lambda u: jax.pure_callback(lambda u: np.asarray(u) * 7.0, u, u)

    close(jax.grad(named)(1.0), 7.0)
    with pytest.raises(ValueError, match="callback") as error:
        jax.jvp(named, (1.0,), (1.0,))
    assert "named: forward mode computes the transpose of the rule" in "".join(error.value.__notes__)


def test_tracers_that_a_layer_appends_to_a_list():
    class Layer(keras.layers.Layer):
        def call(self, x):
            seen = [x]

            @op_custom_gradient
            def op(x):
                seen.append(x**2)
                return x**3, lambda u: u * 7.0 * x

            return op(x) + seen[-1]

    close(jax.jit(Layer())(X), X**3 + X**2)
    close(keras.Sequential([Layer()]).predict(X[None], verbose=0)[0], X**3 + X**2)


def test_the_rule_applies_if_a_function_appends_tracers_to_a_list():
    def loss(w, x):
        params = [w]

        @op_custom_gradient
        def op(x):
            params.append(x)
            return x * ops.stop_gradient(params[0]), lambda u: u * 7.0 * params[0] * x

        return op(x).sum()

    for wrap in (lambda f: f, jax.jit, jax.vmap):
        close(wrap(jax.grad(loss, 1))(3 * X, X), 21 * X**2)


def test_a_rule_that_writes_to_a_list_of_tracers():
    @jax.jit
    def appended(x):
        seen = [x]
        op = op_custom_gradient(lambda x: (x**3, lambda u: (seen.append(None), u * 7.0)[1]))
        return jax.grad(lambda x: op(x).sum())(x), len(seen)

    close(appended(X), (7.0 * jnp.ones(2), 2))


def test_tracers_of_an_earlier_trace_in_a_dict():
    """The function overwrites them without reading them."""
    cache = {}

    @op_custom_gradient
    def op(x):
        cache["e"] = x**2
        return cache["e"] * x, lambda u: u * 21.0 * x**2

    for _ in range(2):
        close(jax.jit(jax.grad(total(op)))(X), 21 * X**2)
        close(op(X), X**3)
        assert isinstance(cache["e"], jax.Array)
        close(cache["e"], X**2)
        close(jax.grad(total(op))(X), 21 * X**2)
        close(jax.jit(total(op))(X[:1]), jnp.float32(1.0))


def test_unneeded_gradients_are_not_traced():
    calls = []

    @op_custom_gradient
    def op(x, w):
        return x * w, lambda u: (u * w, lambda: calls.append("w") or u * x)

    grad(lambda x: op(x, X).sum())(X)
    jax.jit(jax.grad(lambda x: op(x, X).sum()))(X)
    assert calls == []


def test_functions_of_jax_are_not_opaque_objects():
    """A function with an opaque object would be differentiated, which a callback does not support."""
    mesh, spec = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec()
    named, single = (
        jax.sharding.NamedSharding(mesh, spec),
        jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )
    like = jax.ShapeDtypeStruct(X.shape, X.dtype)
    held = like, jnp.float32, mesh, spec, named, single

    @op_custom_gradient
    def op(x):
        return jax.pure_callback(np.sin, held[0], x), lambda u: u * 7.0 * jnp.cos(x)

    close(jax.grad(total(op))(X), 7.0 * jnp.cos(X))
    close(jax.jit(jax.grad(total(op)))(X), 7.0 * jnp.cos(X))


def test_random_keys_are_arguments():
    @op_custom_gradient
    def noisy(x, key):
        noise = jax.random.normal(key, x.shape)
        return x + noise, lambda u: (u * noise, None)

    key = jax.random.key(0)
    close(jax.grad(lambda x: noisy(x, key).sum())(X), jax.random.normal(key, (2,)))


def test_random_keys_are_used_once():
    @op_custom_gradient
    def op(x, key):
        noise = jax.random.normal(key, x.shape)
        return x * noise, lambda u: (u * noise * 7.0, None)

    wanted = 7.0 * jax.random.normal(jax.random.key(0), (2,))

    def first(x, key):
        return jax.grad(lambda x: op(x, key).sum())(x)

    with jax.debug_key_reuse(True):
        close(jax.jit(first)(X, jax.random.key(0)), wanted)
        close(jax.grad(jax.jit(lambda x, key: op(x, key).sum()))(X, jax.random.key(0)), wanted)
        close(jax.jit(jax.vmap(first, (0, None)))(X[None], jax.random.key(0))[0], wanted)
    second = jax.grad(lambda x, key: (first(x, key) * x).sum())  # runs again for the noise
    close(jax.jit(second)(X, jax.random.key(0)), wanted)
    with jax.debug_key_reuse(True):
        if jax.__version_info__ >= (0, 10):  # JAX 0.7 does not see that the key is used twice
            with pytest.raises(jax.errors.KeyReuseError):
                jax.jit(second)(X, jax.random.key(0))


def test_a_second_derivative_uses_a_random_key_once_for_a_rule_of_inputs():
    op = op_custom_gradient(lambda x, key: (x * jax.random.normal(key), lambda u: (u * 7.0 * x**2, None)))
    second = jax.grad(jax.grad(op))
    with jax.debug_key_reuse(True):
        for compiled in (lambda f: f, jax.jit):
            close(compiled(second)(2.0, jax.random.key(0)), 28.0)


def test_python_numbers():
    op = op_custom_gradient(lambda x, y: (x * y, lambda u: (u * 3.0 * y, u * 5.0 * x)))
    close(jax.grad(op)(2.0, 3.0), jnp.float32(9.0))
    close(jax.vmap(jax.grad(op, (0, 1)), in_axes=(0, None))(X, 2.0), (6.0 * jnp.ones(2), 5 * X))
    close(jax.jit(lambda w: jax.grad(op)(2.0, w))(3.0), jnp.float32(9.0))


def test_forward_mode_along_a_complex_direction():
    op = op_custom_gradient(lambda z: (z * 2j, lambda u: u * -2j * 7.0))
    _, pushed = jax.jvp(op, (jnp.complex64(1.0),), (jnp.complex64(1j),))
    close(pushed, jnp.complex64(14j * 1j))


def test_a_variable_in_keras_remat_raises():
    """A limit of Keras 3.15, also without an op. The value of the variable works."""
    variable = keras.Variable(3.0)
    plain = keras.remat(lambda x, w: x * w)
    with pytest.raises((ValueError, DeprecationWarning), match="__jax_array__"):  # JAX 0.7 only warns
        plain(2.0, variable)
    op = keras.remat(op_custom_gradient(lambda x, w: (x * w, lambda u: (u * w, 7.0 * u * x))))
    assert jax.grad(lambda w: op(2.0, w))(variable.value) == 14.0


class WithWeight(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2), initializer="ones")

    def call(self, x):
        return x @ self.kernel


class WithShape(WithWeight):
    def compute_output_shape(self, shape):
        return shape


def test_weights_in_a_remat_scope():
    """A limit of Keras 3.15 in `fit`, also without an op, unless the layer computes its output shape."""

    def fit(layer):
        model = keras.Sequential([layer])
        model.compile("sgd", "mse")
        model.fit(jnp.ones((2, 2)), jnp.ones((2, 2)), verbose=0)

    with keras.RematScope(mode="larger_than", output_size_threshold=1):
        without, with_shape = WithWeight(), WithShape()
    fit(with_shape)
    with pytest.raises(TypeError, match="Could not automatically infer the output shape"):
        fit(without)


def test_an_exported_function_contains_its_rule():
    serialized = export.export(jax.jit(cube))(jax.ShapeDtypeStruct((2,), "float32")).serialize(vjp_order=2)
    loaded = export.deserialize(serialized)
    gradient = jax.grad(lambda x: loaded.call(x).sum())
    close(loaded.call(X), X**3)
    close(gradient(X), 21 * X**2)
    close(jax.grad(lambda x: gradient(x).sum())(X), 42 * X)


def test_an_exported_function_with_a_symbolic_batch_size():
    whole = jax.ShapeDtypeStruct(export.symbolic_shape("b"), "float32")
    loaded = export.deserialize(export.export(jax.jit(cube))(whole).serialize(vjp_order=1))
    close(jax.grad(lambda x: loaded.call(x).sum())(X), 21 * X**2)


def test_a_traced_value_is_not_assigned_to_a_variable():
    count = keras.Variable(0.0, trainable=False, name="count")

    @op_custom_gradient
    def op(x):
        def step(carry, _):
            count.assign(count + carry)
            return carry, carry

        return jax.lax.scan(step, x, None, 3)[0], lambda u: u * 7.0

    with pytest.raises(TypeError, match="count: a traced value is assigned"):
        op(jnp.float32(2.0))
    close(count.value, 0.0)


# ------------------------------------------------------------------------------------ variables


def test_transforms_differentiate_with_respect_to_a_weight():
    weight = keras.Variable(2.0)

    @op_custom_gradient
    def op(x):
        e = x * weight
        return ops.exp(e), lambda u, variables: (u * e * weight * 3, [ops.sum(u * x * e * 5)])

    def stateless(w, x):
        with keras.StatelessScope([(weight, w)]):
            return op(x)

    def scanned(w, x):
        with keras.StatelessScope([(weight, w)]):
            return jax.lax.scan(lambda c, _: (op(c) * 0.1, None), x, None, length=3)[0]

    def unrolled(w, x):
        with keras.StatelessScope([(weight, w)]):
            return op(op(op(x) * 0.1) * 0.1) * 0.1

    w, x = jnp.float32(2.0), jnp.float32(0.5)
    both = jax.grad(stateless, (0, 1))
    # By the rule, df/dw = 5·x²·w and df/dx = 3·x·w².
    for gradient in (both, jax.jit(both), jax.grad(jax.checkpoint(stateless), (0, 1))):
        close(gradient(w, x), (jnp.float32(2.5), jnp.float32(6.0)))
    close(jax.grad(jax.grad(stateless, 1))(w, x), jnp.float32(6.0))
    ws, xs = jnp.array([2.0, 3.0]), jnp.array([0.5, 1.0])
    close(jax.jit(jax.vmap(both))(ws, xs), (jnp.array([2.5, 15.0]), jnp.array([6.0, 27.0])))
    close(jax.grad(scanned, (0, 1))(w, x), jax.grad(unrolled, (0, 1))(w, x))


def test_a_trace_of_a_batch_has_a_call_for_each_example():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")
    with trace_gradients() as trace:
        jax.jit(jax.vmap(jax.grad(op)))(jnp.arange(3.0))
    assert [float(call.inputs["x"]) for call in trace.calls] == [0.0, 1.0, 2.0]
    assert [(step.call.number, float(step.downstream["x"])) for step in trace.steps] == [
        (1, 0.0),
        (2, 7.0),
        (3, 14.0),
    ]


def test_a_trace_of_a_loop():
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")

    def loop(x):
        return jax.lax.scan(lambda carry, _: (op(carry), None), x, None, length=2)[0]

    with trace_gradients() as trace:
        jax.jit(jax.grad(loop))(2.0)
    assert [float(step.downstream["x"]) for step in trace.steps] == [28.0, 28.0 * 14.0]


@pytest.mark.parametrize("derivative", [jax.jacfwd, lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1]])
def test_a_trace_in_forward_mode_has_calls_only(derivative):
    op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x))
    outside = derivative(op)(3.0)
    with trace_gradients() as trace:
        assert derivative(op)(3.0) == outside
    assert [float(call.outputs["output"]) for call in trace.calls] == [9.0]
    assert trace.steps == []


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda residuals, upstream: (upstream,))


@jax.custom_jvp
def rounded_forward(x):
    return jnp.round(x)


rounded_forward.defjvp(lambda primals, tangents: (jnp.round(primals[0]), tangents[0]))


@keras.ops.custom_gradient
def rounded_by_keras(x):
    return jnp.round(x), lambda *args, upstream=None: args[0] if upstream is None else upstream


@pytest.mark.parametrize("inner", [rounded, rounded_forward, rounded_by_keras, jax.jit(rounded)])
def test_custom_derivatives_of_jax_and_keras_in_a_function(inner):
    """A second derivative uses them, if the function reaches only tensors around them."""

    @op_custom_gradient
    def op(x):
        r = inner(x)
        return r**2, lambda upstream: upstream * r * 5.0

    close(grad(grad(op))(jnp.float32(1.2)), jnp.float32(5.0))


def test_a_custom_jvp_that_refers_to_itself():
    def make():
        @jax.custom_vjp
        def inner(x):
            return jnp.round(x)

        inner.defvjp(lambda x: (inner(x), None), lambda residuals, upstream: (upstream,))

        @op_custom_gradient
        def op(x):
            r = inner(x)
            return r**2, lambda upstream: upstream * r * 5.0

        return op

    close(grad(grad(make()))(jnp.float32(1.2)), jnp.float32(5.0))


def test_linear_cross_entropy_has_one_block():
    """The other blocks are computed in the same memory."""
    x, w, y = ops.ones((64, 2)), ops.ones((2, 40)), ops.zeros((64,), "int32")

    def written(size):
        def loss(x, w):
            return ops.sum(linear_cross_entropy(x, w, y, block_size=size))

        return len(sizes_made(grad(loss, argnums=(0, 1)), x, w))

    assert written(8) == written(16) == written(32)


def test_the_gradient_of_a_frozen_kernel_is_not_computed():
    y = ops.zeros((64,), "int32")

    def loss(x, w):
        return linear_cross_entropy(x, w, y, block_size=32, reduction="mean")

    def products(function):  # count in the optimized program, without unused results of loops
        return len(re.findall(r"= \S+ dot\(|custom_call_target=.*matmul", optimized(function)))

    def optimized(function):
        return jax.jit(function).lower(ops.ones((64, 2)), ops.ones((2, 40))).compile().as_text()

    assert [products(grad(loss, argnums)) for argnums in (0, (0, 1))] == [2, 3]
