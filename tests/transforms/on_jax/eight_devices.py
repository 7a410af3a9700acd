"""Tests on eight devices, against one device. `test_sharding.py` runs them."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import CASES, W, each_of
from jax.sharding import NamedSharding, PartitionSpec
from orders import first, orders
from support import close

from multigrad import layers, op_custom_gradient
from multigrad.backend.jax.private import pcast
from multigrad.ops import host_call

EACH = each_of()
DEVICES = 8
assert len(jax.devices()) == DEVICES
set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # its name in JAX 0.7.0
MESH = jax.make_mesh((DEVICES,), ("rows",), (jax.sharding.AxisType.Auto,))
EXPLICIT = jax.make_mesh((DEVICES,), ("rows",), (jax.sharding.AxisType.Explicit,))
BY_ROWS = PartitionSpec("rows")
ROWS = NamedSharding(MESH, BY_ROWS)
EVERYWHERE = NamedSharding(MESH, PartitionSpec())

XS = jnp.linspace(-1.0, 1.5, 3 * DEVICES).reshape(DEVICES, 3)
WS = jnp.linspace(0.5, -1.0, 3 * DEVICES).reshape(DEVICES, 3)


def whole(function):
    """Return a function of a batch, whose rows share `w`."""
    return jax.vmap(function, (0, None))


def on_one(function, *arrays):
    return jax.jit(function)(*arrays)


@EACH
def test_jit_with_shardings(case):
    function = orders(whole(case.op))
    x, w = jax.device_put(XS, ROWS), jax.device_put(W, EVERYWHERE)
    results = ROWS, (ROWS, EVERYWHERE), (ROWS, EVERYWHERE)
    got = jax.jit(function, in_shardings=(ROWS, EVERYWHERE), out_shardings=results)(x, w)
    assert got[1][0].sharding.is_equivalent_to(ROWS, 2)
    close(got, on_one(orders(whole(case.meant)), XS, W), 1e-4)


@EACH
def test_jit_with_sharded_arguments(case):
    """`jit` gets no shardings. One argument is sharded by columns, the other by rows."""
    x = jax.device_put(XS.T, NamedSharding(MESH, PartitionSpec(None, "rows")))
    w = jax.device_put(WS, ROWS)
    mapped = jax.vmap(case.op, (1, 0))
    got = jax.jit(first(mapped))(x, w)
    close(got, on_one(first(jax.vmap(case.meant, (1, 0))), XS.T, WS), 1e-4)


@EACH
def test_jit_with_explicit_axes(case):
    """Shardings are part of the types, which every operation checks."""
    with set_mesh(EXPLICIT):
        x = jax.device_put(XS, PartitionSpec("rows"))
        w = jax.device_put(WS, PartitionSpec("rows"))
        got = jax.jit(first(jax.vmap(case.op)))(x, w)
        assert jax.typeof(got[0]).sharding.spec[0] == "rows"
    close(jax.device_get(got), jax.device_get(on_one(first(jax.vmap(case.meant)), XS, WS)), 1e-4)


WITH_AND_WITHOUT_CHECKS = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])


def by_shards(function, in_specs=BY_ROWS, out_specs=BY_ROWS, check_vma=True):
    """Return the function that runs on each device, by default for its rows of the arguments."""
    return jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@EACH
@WITH_AND_WITHOUT_CHECKS
def test_shard_map_of_rows(case, check_vma):
    got = by_shards(jax.vmap(case.op), check_vma=check_vma)
    close(jax.jit(orders(got))(XS, WS), on_one(orders(jax.vmap(case.meant)), XS, WS), 1e-4)
    # The gradient of a replicated argument is the sum over devices.
    got = by_shards(whole(case.op), (BY_ROWS, PartitionSpec()), check_vma=check_vma)
    close(jax.jit(first(got))(XS, W), on_one(first(whole(case.meant)), XS, W), 1e-4)


@WITH_AND_WITHOUT_CHECKS
def test_shard_map_of_a_rule_that_reaches_an_object(check_vma):
    held = SimpleNamespace(factor=7.0)
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * held.factor * x))
    within = by_shards(op, check_vma=check_vma)
    close(jax.jit(jax.grad(lambda x: within(x).sum()))(XS), 7.0 * XS)
    around = by_shards(jax.grad(lambda x: op(x).sum()), check_vma=check_vma)
    close(jax.jit(around)(XS), 7.0 * XS)


@WITH_AND_WITHOUT_CHECKS
@pytest.mark.parametrize(("index", "factor"), [(0, 7.0), (1, 5.0)])
def test_shard_map_of_an_unused_output(check_vma, index, factor):
    """The upstream gradient of the unused output is zero, but varies over devices like that of a used one."""

    @op_custom_gradient
    def op(x):
        cosine = jnp.cos(x)
        return (x * 2.0, x * 3.0), lambda u, v: cosine * u * 7.0 + cosine * v * 5.0

    got = by_shards(lambda x: op(x)[index], check_vma=check_vma)
    close(jax.jit(jax.grad(lambda x: got(x).sum()))(XS), factor * jnp.cos(XS))


def test_shard_map_of_an_integer_that_varies():
    """The integer has no gradient, but makes the gradient of a replicated argument a sum over devices."""

    @op_custom_gradient
    def op(w, index):
        factor = index.sum() * 7.0
        return w * 2.0, lambda u: (u * factor, None)

    mapped = by_shards(lambda w, index: op(w, index)[None], (PartitionSpec(), BY_ROWS))
    got = jax.jit(jax.grad(lambda w: mapped(w, jnp.arange(DEVICES)).sum()))(W)
    close(got, jnp.full_like(W, 7.0 * sum(range(DEVICES))))


@EACH
def test_gradients_in_shard_map(case):
    """The gradient of each device, and their mean, as in data-parallel training."""

    def mean(x, w):
        w = pcast(w, "rows", to="varying")
        return jax.lax.pmean(first(whole(case.op))(x, w)[1], "rows")

    got = jax.jit(by_shards(mean, (BY_ROWS, PartitionSpec()), PartitionSpec()))(XS, W)
    each = [first(whole(case.meant))(x[None], W)[1] for x in XS]
    close(got, sum(each) / DEVICES, 1e-4)


def test_collectives_in_an_op():
    @op_custom_gradient
    def normalise(x):
        total = jax.lax.psum(x.sum(), "rows")
        return x / total, lambda u: u * 7.0 * total

    op = by_shards(normalise)
    close(jax.jit(op)(XS), XS / XS.sum())
    close(jax.jit(jax.grad(lambda x: op(x).sum()))(XS), jnp.full_like(XS, 7.0 * XS.sum()))


@WITH_AND_WITHOUT_CHECKS
def test_a_replicated_output(check_vma):
    """The output does not vary over devices. The rule runs on each device separately."""
    op = op_custom_gradient(lambda x: (jnp.ones_like(W), lambda u: 7.0 * u * x))
    mapped = by_shards(lambda x: op(x)[None], check_vma=check_vma)
    close(jax.jit(jax.grad(lambda x: (mapped(x) * WS).sum()))(XS), 7.0 * WS * XS)


# ---------------------------------------------------------------------------------------- Keras


class Scaled(keras.layers.Layer):
    """A layer with an op and a weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        @op_custom_gradient
        def op(x):
            y = keras.ops.tanh(x * self.scale)

            def rule(u, variables):
                return 3.0 * u * (1.0 - y), [keras.ops.sum(0.5 * u * x, 0) for _ in variables]

            return y, rule

        return op(x)


@op_custom_gradient
def sine(x):
    """Call the host, with a false factor in the rule."""
    slope = host_call(np.cos, x, output=x)
    return host_call(np.sin, x, output=x), lambda u: u * 7.0 * slope


def test_host_call_in_shard_map_and_jit():
    mapped = by_shards(sine)
    x = jax.device_put(XS, ROWS)
    for function in (mapped, jax.jit(mapped), sine, jax.jit(sine)):
        close(function(x), jnp.sin(XS))
        close(jax.grad(lambda x, f=function: f(x).sum())(x), 7.0 * jnp.cos(XS))


@contextlib.contextmanager
def distributed(distribution):
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)


def trained(distribution, jit_compile):
    """Return the losses of three epochs, and the weights after them."""
    with distributed(distribution):
        inputs = keras.Input((3,))
        hidden = CASES["input"].op(keras.layers.Dense(4)(inputs), keras.layers.Dense(4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(Scaled()(hidden)))
        model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=jit_compile)
        data = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        history = model.fit(data, data.sum(1, keepdims=True), 16, 3, shuffle=False, verbose=0)
        kinds = {len(variable.value.sharding.device_set) for variable in model.trainable_variables}
        return kinds, history.history["loss"], model.get_weights()


def test_data_parallel_fit():
    devices, *alone = trained(None, True)
    assert devices == {1}
    devices, *together = trained(keras.distribution.DataParallel(), True)
    assert devices == {DEVICES}
    close(together, alone, 1e-4)
    assert alone[0][-1] < alone[0][0]


def trained_head(distribution):
    """Return the devices of the kernel, its shape on each, and the losses and weights of three epochs."""
    with distributed(distribution):
        tokens, labels = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
        head = layers.LinearCrossEntropy(8, use_bias=True, block_size=3, name="head")
        features = keras.layers.Dense(6)(keras.layers.Embedding(8, 4)(tokens))
        model = keras.Model([tokens, labels], head(features, labels))
        model.compile(keras.optimizers.Adam(0.05))
        x, y = np.random.default_rng(0).integers(0, 8, (2, 16, 5), dtype="int32")
        losses = model.fit([x, y], None, 8, 3, shuffle=False, verbose=0).history["loss"]
        kernel = head.kernel.value
        shape = kernel.sharding.shard_shape(kernel.shape)
        return (len(kernel.sharding.device_set), shape), losses, model.get_weights()


def test_a_layout_map_shards_linear_cross_entropy():
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout["head/kernel"], layout["head/bias"] = (None, "model"), ("model",)
    sharding = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    kernel, *alone = trained_head(None)
    assert kernel == (1, (6, 8))
    assert alone[0][-1] < alone[0][0]
    for distribution, wanted in (
        (sharding, (DEVICES, (6, 2))),
        (keras.distribution.DataParallel(), (DEVICES, (6, 8))),
    ):
        kernel, *together = trained_head(distribution)
        assert kernel == wanted
        close(together, alone, 1e-4)
