"""Functions run as under a hand-written rule: with concrete values, and without being differentiated."""

from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, array, close
from support import compiled as traced

from multigrad import grad, op_custom_gradient


class Cube:
    """A solver on NumPy arrays, whose method the rule calls. Its vjp has a false factor of 7."""

    def __init__(self, x, exponent=3):
        self.x, self.exponent = np.asarray(x), exponent

    def compute(self):
        return self.x**self.exponent

    def vjp(self, upstream):
        return 7.0 * self.x ** (self.exponent - 1) * upstream


def solve(x, solver):
    def rule(upstream):
        return ops.convert_to_tensor(solver.vjp(ops.convert_to_numpy(upstream)))

    return ops.convert_to_tensor(solver.compute()), rule


def a_settings_object():
    class Settings:
        solver, exponent = Cube, 3

    settings = Settings()
    return op_custom_gradient(
        lambda x: solve(x, settings.solver(ops.convert_to_numpy(x), exponent=settings.exponent))
    )


def a_branch_on_a_value():
    @op_custom_gradient
    def op(x):
        def rule(upstream):
            return upstream * 7.0 * x**2 if float(ops.sum(upstream)) > 0 else upstream

        return x**3 if float(ops.sum(x)) > 0 else x, rule

    return op


class Layer(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer="ones")

    @op_custom_gradient
    def call(self, x):
        solver = Cube(ops.convert_to_numpy(x) * ops.convert_to_numpy(self.w))

        def rule(upstream, variables):
            assert [variable is self.w for variable in variables] == [True]
            gradient = ops.convert_to_tensor(solver.vjp(ops.convert_to_numpy(upstream)))
            return gradient, [5.0 * ops.sum(gradient)]

        return ops.convert_to_tensor(solver.compute()), rule


def a_layer_with_a_weight():
    layer = Layer()
    layer.build((2,))
    return layer


FORMS = [a_settings_object, a_branch_on_a_value, a_layer_with_a_weight]


@pytest.mark.parametrize("form", FORMS)
def test_eager_code_sees_concrete_values(form):
    op = form()
    close(grad(lambda x: ops.sum(op(x)))(array([3.0, 4.0])), array([63.0, 112.0]))


def test_a_rule_that_uses_its_object_sees_concrete_values():
    """It stores its upstream gradient on the object, as a monitor does."""

    class Recorder:
        @op_custom_gradient
        def __call__(self, x):
            def rule(upstream):
                self.seen = upstream
                return upstream * 7.0 if float(ops.sum(upstream)) > 0.0 else upstream

            return x * 1.0, rule

    recorder = Recorder()
    close(grad(lambda x: ops.sum(3.0 * recorder(x)))(array([1.0, 2.0])), array([21.0, 21.0]))
    close(recorder.seen, array([3.0, 3.0]))


def test_differentiated_weights_are_concrete():
    layer = a_layer_with_a_weight()
    of_x, (of_w,) = grad(lambda x: ops.sum(layer(x)), 0, variables=[layer.w])(array([3.0, 4.0]))
    close(of_x, array([63.0, 112.0]))
    close(of_w, array(5.0 * (63.0 + 112.0)))


def on_host(function, x):
    """Call a NumPy function, which has no derivative."""
    return ops.convert_to_tensor(function(ops.convert_to_numpy(x)).astype("float32"))


def test_a_rule_that_stops_the_gradient_of_an_input():
    """On JAX, `stop_gradient` of a concrete array returns this array."""
    weight = keras.Variable(2.0, name="weight")

    @op_custom_gradient
    def op(x):
        stopped = ops.stop_gradient(x)
        return x * stopped, lambda upstream: upstream * 7.0 * stopped * x

    @op_custom_gradient
    def reader(x):
        stopped = ops.stop_gradient(x)

        def rule(upstream, variables):
            return upstream * 7.0 * stopped * x, [upstream * 5.0 * stopped * x]

        return x * stopped * weight, rule

    x = array(3.0)
    close((grad(grad(op))(x), grad(grad(reader))(x)), (array(21.0), array(21.0)))
    # The inner derivative is that of the weight alone, the outer one that of `x` alone.
    of_weight = grad(lambda x: grad(reader, (), variables=[weight])(x)[1][0])
    close(of_weight(x), array(15.0))


def storing(kind):
    """Return an op whose function stores an intermediate result where the function can reach it."""
    holder, cache, seen, last = SimpleNamespace(), {}, [], None

    def store(t):
        nonlocal last
        last = t

    stores = {"attribute": partial(setattr, holder, "last"), "dict": partial(cache.__setitem__, "last")}
    store = (stores | {"list": seen.append}).get(kind, store)

    @op_custom_gradient
    def op(x):
        t = ops.exp(x)
        store(t)
        return 2.0 * t, lambda upstream: 3.0 * upstream * t

    return op


class Activation(keras.layers.Layer):
    """A layer that keeps its activation."""

    @op_custom_gradient
    def call(self, x):
        self.last = t = ops.exp(x)
        return 2.0 * t, lambda upstream: 3.0 * upstream * t


def eager_seconds():
    """Yield functions that differentiate a function of a scalar twice in eager code."""
    yield lambda f: grad(grad(f))
    if BACKEND == "jax":
        import jax

        yield lambda f: jax.grad(jax.grad(f))


def native_seconds():
    """Yield the same, also compiled and by the transforms of the framework."""
    yield from eager_seconds()
    yield lambda f: traced(grad(grad(f)))
    if BACKEND == "jax":
        import jax

        yield lambda f: jax.grad(jax.jit(jax.grad(f)))
        yield jax.hessian
    elif BACKEND == "torch":
        import torch

        yield lambda f: torch.func.grad(torch.func.grad(f))
        yield torch.func.hessian


@pytest.mark.parametrize("kind", ["attribute", "dict", "list", "nonlocal", "layer"])
def test_an_intermediate_result_that_the_function_stores(kind):
    """The result is not a constant, although the function can reach it after the run."""
    for second in native_seconds():
        op = Activation() if kind == "layer" else storing(kind)
        close(second(op)(array(0.5)), array(3.0 * np.exp(0.5)))


def test_a_function_without_a_derivative_whose_rule_stops_a_gradient():
    @op_custom_gradient
    def op(x):
        stopped = ops.stop_gradient(x)
        return on_host(np.square, x), lambda upstream: upstream * 7.0 * stopped * x

    close(grad(op)(array(3.0)), array(63.0))
    if BACKEND == "jax":  # cannot tell the stopped input from another intermediate result
        with pytest.raises(NotImplementedError, match="op: the rule uses an intermediate result"):
            grad(grad(op))(array(3.0))
    else:
        close(grad(grad(op))(array(3.0)), array(21.0))


def by_jax(x):
    import jax.numpy as jnp

    return jnp.asarray(x).astype(x.dtype)


STAYS = [ops.convert_to_tensor, lambda x: ops.cast(x, "float32"), *([by_jax] if BACKEND == "jax" else [])]


@pytest.mark.parametrize("stay", STAYS)
def test_an_input_that_is_converted_stays_an_input(stay):
    @op_custom_gradient
    def op(x):
        x = stay(x)
        return on_host(np.sin, x), lambda upstream: upstream * 7.0 * x**2

    for second in eager_seconds():
        close(second(op)(array(2.0)), array(28.0))


def test_an_input_is_assigned_under_a_further_derivative():
    last = keras.Variable(0.0, trainable=False)

    @op_custom_gradient
    def op(x):
        last.assign(x)
        return x * 1.0, lambda upstream: upstream * 7.0 * x**2

    for second in eager_seconds():
        last.assign(0.0)
        close(second(op)(array(2.0)), array(28.0))
        close(last, array(2.0))


def test_a_function_sees_values_under_a_further_derivative():
    """NumPy, branches and texts work with them."""
    texts = []

    @op_custom_gradient
    def op(x):
        assert bool(x)
        if BACKEND == "jax":  # a kernel of another library gets its operand by DLPack, for example
            assert np.from_dlpack(x) == x.item() == x.tolist() == 4.0
        assert float(x) == int(x) == complex(x) == ops.convert_to_numpy(x).item() == np.asarray(x) == 4.0
        texts.append(f"{x} {x!r}")
        return on_host(np.square, x) if x > 0.0 else x, lambda upstream: upstream * 7.0 * x**2

    close(grad(grad(grad(op)))(array(4.0)), array(14.0))
    assert texts
    assert all([text.count("4") == 2 for text in texts])


def in_numpy(x):
    return ops.convert_to_numpy(ops.exp(x))


def in_an_array_of_objects(x):
    held = np.empty(1, object)
    held[0] = ops.exp(x)
    return held


@pytest.mark.parametrize("hold", [in_numpy, in_an_array_of_objects])
def test_an_intermediate_result_in_a_numpy_array(hold):
    """On PyTorch it is a constant, as the limits say, and on TensorFlow the array of numbers is."""

    @op_custom_gradient
    def op(x):
        held = hold(x)
        return x * 2.0, lambda upstream: upstream * 7.0 * ops.convert_to_tensor(held.flat[0])

    x = array(0.5)
    close(grad(op)(x), 7.0 * ops.exp(x))
    if BACKEND == "torch" or (BACKEND == "tensorflow" and hold is in_numpy):
        close(grad(grad(op))(x), array(0.0))
    elif hold is in_numpy:
        with pytest.raises(NotImplementedError, match="op: the rule uses an intermediate result"):
            grad(grad(op))(x)
    else:
        close(grad(grad(op))(x), 7.0 * ops.exp(x))


def test_a_table_of_an_object_is_a_constant():
    class Table:
        values = None

        @op_custom_gradient
        def __call__(self, x):
            values = self.values
            return on_host(np.sin, x), lambda upstream: upstream * x**2 * values[0]

    table = Table()
    table.values = np.array([7.0], "float32")
    close(grad(grad(table))(array(2.0)), array(28.0))


ONLY_JAX = pytest.mark.skipif(BACKEND != "jax", reason="tests callbacks, kernels and devices of JAX")


def callback(function, x):
    import jax

    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(
        lambda v: function(np.asarray(v)).astype(v.dtype), spec, x, vmap_method="expand_dims"
    )


@ONLY_JAX
def test_a_kernel_of_jax():
    import jax
    from jax.experimental import pallas

    @op_custom_gradient
    def kernel(x):
        def double(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2.0

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        doubled = pallas.pallas_call(double, out_shape=shape, interpret=True)(x)
        return doubled, lambda upstream: upstream * 7.0 * x**2

    x = array(0.5)
    for compiled in (lambda f: f, jax.jit):
        close(compiled(grad(kernel))(x), 7.0 * x**2)
        close(compiled(grad(grad(kernel)))(x), 14.0 * x)


@ONLY_JAX
def test_a_function_is_not_differentiated_at_any_order():
    """Differentiating the function raises an AssertionError, like a kernel with `pl.when`."""
    import jax

    @jax.custom_jvp
    def cube(x):
        return x**3

    @cube.defjvp
    def cube_jvp(primals, tangents):
        raise AssertionError("the function is differentiated")

    op = op_custom_gradient(lambda x: (cube(x), lambda upstream: upstream * 7.0 * x**2))
    x = array(2.0)
    for differentiate in (jax.grad, grad):
        for compiled in (lambda f: f, jax.jit):
            close(compiled(differentiate(differentiate(op)))(x), array(28.0))
            close(compiled(differentiate(differentiate(differentiate(op))))(x), array(14.0))


@ONLY_JAX
def test_a_function_that_closes_over_a_tracer_around_a_callback():
    import jax

    def loss(w, x):
        op = op_custom_gradient(lambda x: (callback(np.sin, x), lambda upstream: upstream * 7.0 * w * x**2))
        return op(x) * w

    for compiled in (lambda f: f, jax.jit):
        of_w, of_x = compiled(jax.grad(jax.grad(loss), (0, 1)))(array(3.0), array(2.0))
        close((of_w, of_x), (array(0.0), array(84.0)))


@ONLY_JAX
def test_shard_map_in_eager_code():
    import jax
    from jax.sharding import PartitionSpec

    op = op_custom_gradient(lambda x: (ops.exp(x), lambda upstream: upstream * 7.0 * x))
    mesh = jax.make_mesh((1,), ("rows",), (jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("rows")
    sharded = jax.shard_map(op, mesh=mesh, in_specs=rows, out_specs=rows)
    x = array([0.5, 2.0])
    close(jax.grad(lambda x: sharded(x).sum())(x), 7.0 * x)
    close(
        jax.shard_map(jax.grad(lambda x: op(x).sum()), mesh=mesh, in_specs=rows, out_specs=rows)(x), 7.0 * x
    )
