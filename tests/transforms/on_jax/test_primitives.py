"""The primitives of an op: with a linearization of their own, and with one that JAX derives from the jvp."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from cases import W, X, as_meant
from orders import compiled_orders, first
from support import close

from multigrad import grad, op_custom_gradient
from multigrad.backend.jax import primitives, private, strip

LINEARIZATIONS = private._primitive_linearizations

OWN_AND_DERIVED = pytest.mark.parametrize("derived", [False, True], ids=["own", "derived"])


@pytest.fixture
def linearization(derived, monkeypatch):
    """Use the linearizations of the primitives, or remove them, as in a version without the private table."""
    if derived and private._IS_KNOWN:
        for primitive in (strip._strip_p, primitives._tie_p):
            monkeypatch.delitem(LINEARIZATIONS, primitive)


@OWN_AND_DERIVED
@as_meant
def test_derivatives(f, linearization):
    return compiled_orders(f), first(first(f))(X, W)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="the table has another form before JAX 0.10")
def test_the_linearizations_are_used_from_jax_0_10_on():
    assert primitives._tie_p in LINEARIZATIONS


@op_custom_gradient
def product(x, w):
    return x * w, lambda u: (7.0 * u * w, 5.0 * u * x)


def inner(transform):
    """Transform a function that closes over `x`, which is differentiated outside."""
    return lambda x: x * transform(jax.grad(lambda w: product(x, w) * w))(2.0)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda w: jax.vmap(f)(w * jnp.ones(3))[1]],
    ids=["eager", "jit", "checkpoint", "vmap"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_derivatives_of_two_levels_are_separate(transform, around):
    # The inner derivative is x w + 5 x w for w = 2. Its derivative with respect to x is 7 w + 5 w.
    close(around(jax.value_and_grad(inner(transform)))(3.0), (3.0 * 36.0, 36.0 + 3.0 * 24.0))


def test_unused_and_integer_outputs():
    @op_custom_gradient
    def op(x, index):
        return (x * 2.0, index + 1, x * 3.0), lambda u: (7.0 * u[0] + 5.0 * u[2], None)

    index = jnp.asarray([1, 2, 3])
    for place, factor in ((0, 7.0), (2, 5.0)):
        close(jax.grad(lambda x, place=place: op(x, index)[place].sum())(X), factor * jnp.ones(3))
    close(jax.grad(lambda x: (op(x, index)[1] * x).sum())(X), index + 1.0)
    _, pull = jax.vjp(op, X, index)
    zeros = jnp.zeros(3), jax.numpy.zeros(3, jax.dtypes.float0), jnp.zeros(3)
    assert pull((X, *zeros[1:]))[1].dtype == jax.dtypes.float0


USES = {
    "eager": lambda push: push(X),
    "jit": lambda push: jax.jit(push)(X),
    "vmap": lambda push: jax.vmap(push)(X[None]),
    "map": lambda push: jax.lax.map(push, X[None]),
    "jit of it all": lambda push: jax.jit(lambda x: jax.linearize(double, x)[1](x))(X),
}

double = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_linearized_function(use):
    close(jnp.ravel(use(jax.linearize(double, X)[1])), 7.0 * X)


@OWN_AND_DERIVED
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.skipif(not hasattr(jax, "new_ref"), reason="JAX 0.7 has no mutable arrays")
def test_a_closed_over_ref_stays_a_ref(wrap, linearization):
    def loss(x):
        ref = jax.new_ref(2.0 * x)

        @op_custom_gradient
        def own(x):
            before = jax.lax.stop_gradient(ref[...])
            ref[...] = x
            return x * before, lambda u: u * 7.0

        return own(x).sum()

    close(wrap(jax.grad(loss))(X), 7.0 * jnp.ones(3))


@OWN_AND_DERIVED
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_python_number_as_a_cotangent(wrap, linearization):
    both = op_custom_gradient(lambda x: ((x * 2.0, x * 3.0), lambda u: u[0] * 7.0 + u[1] * 5.0))
    turned = op_custom_gradient(lambda x: (x * 1j, lambda u: u * 7.0))
    close(wrap(lambda x: jax.vjp(double, x)[1](1.0)[0])(X[0]), 7.0)
    close(wrap(lambda x: jax.vjp(both, x)[1]((1.0, 2.0))[0])(X[0]), 17.0)
    close(wrap(lambda x: jax.vjp(turned, x + 0j)[1](1.0 + 0j)[0])(X[0]), 7.0 + 0j)
    close(wrap(lambda x: jax.linear_transpose(jax.linearize(double, x)[1], x)(1.0)[0])(X[0]), 7.0)


@jax.custom_jvp
def number(x):
    return 3.0


number.defjvp(lambda primals, tangents: (number(*primals), 2.0 * tangents[0]))


@OWN_AND_DERIVED
def test_a_python_number_under_vmap(linearization):
    """An operation before an op may return a Python number, which JAX treats as an array."""
    own = op_custom_gradient(lambda x: (x * x, lambda u: u * x.ndim + u * 7.0))
    close(jax.vmap(lambda x: own(number(x)))(X), 9.0 * jnp.ones(3))
    close(jax.vmap(jax.grad(lambda x: own(number(x))))(X), 14.0 * jnp.ones(3))


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

    close(jax.grad(lambda x: op(x).sum())(X), 7.0 * jnp.cos(X))
    close(jax.jit(jax.grad(lambda x: op(x).sum()))(X), 7.0 * jnp.cos(X))


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


def rounded_by_itself():
    @jax.custom_vjp
    def inner(x):
        return jnp.round(x)

    inner.defvjp(lambda x: (inner(x), None), lambda residuals, upstream: (upstream,))
    return inner


ROUNDED = [rounded, rounded_forward, rounded_by_keras, jax.jit(rounded), rounded_by_itself()]


@pytest.mark.parametrize("inner", ROUNDED)
def test_custom_derivatives_of_jax_and_keras_in_a_function(inner):
    """A second derivative uses them, if the function reaches only tensors around them."""

    @op_custom_gradient
    def op(x):
        r = inner(x)
        return r**2, lambda upstream: upstream * r * 5.0

    close(grad(grad(op))(jnp.float32(1.2)), jnp.float32(5.0))


# ------------------------------------------------------------------------------------- random keys


def test_random_keys_are_used_once():
    @op_custom_gradient
    def op(x, key):
        noise = jax.random.normal(key, x.shape)
        return x * noise, lambda u: (u * noise * 7.0, None)

    wanted = 7.0 * jax.random.normal(jax.random.key(0), X.shape)

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
