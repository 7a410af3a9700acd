"""`jax.lax.cond`, `switch`, `scan`, `fori_loop`, `while_loop` and `map`."""

import jax
import jax.numpy as jnp
import keras
import pytest
from cases import W, X, all_as_meant, as_meant
from orders import WS, XS, compiled_orders, first
from support import close

import multigrad
from multigrad import op_custom_gradient


def branches(f):
    return [f, lambda x, w: f(w, x) * x, lambda x, w: jnp.sin(x)]


def switched(f):
    return lambda index, x, w: jax.lax.switch(index, branches(f), x, w)


def chosen(predicate):
    return lambda f: compiled_orders(lambda x, w: jax.lax.cond(predicate(x), *branches(f)[:2], x, w))


def scanned(f):
    def body(carry, w):
        y = 0.1 * f(carry, w)
        return y, y

    return lambda x, ws: jax.lax.scan(body, x, ws, reverse=True)


def scanned_branches(f):
    def body(x, w):
        return 0.1 * jax.lax.cond(w[0] > 0.0, f, lambda x, w: x * w, x, w), None

    return jax.jit(first(lambda x, ws: jax.lax.scan(body, x, ws)[0]))(X, WS)


test_branches = all_as_meant(
    {
        "the first": chosen(lambda x: x[0] > 0.0),
        "the second": chosen(lambda x: x[0] < 0.0),
        "a concrete predicate": chosen(lambda x: True),
        "branches that close over their operands": lambda f: compiled_orders(
            lambda x, w: jax.lax.cond(x[0] > 0.0, lambda: f(x, w), lambda: x)
        ),
        "switch": lambda f: compiled_orders(lambda x, w: [switched(f)(i, x, w) for i in range(3)]),
        "one index per element": lambda f: compiled_orders(
            lambda x, w: jax.vmap(switched(f))(jnp.asarray([0, 1, 2, 1]), x, w), XS, WS
        ),
        "branches in a scan": scanned_branches,
    }
)

test_loops = all_as_meant(
    {
        "scan": lambda f: compiled_orders(scanned(f), X, WS[:3]),
        "scan with closed-over tensors": lambda f: compiled_orders(
            lambda x, w: jax.lax.scan(lambda x, _: (0.1 * f(x, w), None), x, None, 3)[0]
        ),
        # It is differentiable if its number of iterations is static.
        "fori_loop": lambda f: compiled_orders(
            lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: 0.1 * f(x, w), x)
        ),
        "map": lambda f: compiled_orders(lambda xs, ws: jax.lax.map(lambda both: f(*both), (xs, ws)), XS, WS),
        "gradient descent in a while_loop": lambda f: jax.lax.while_loop(
            lambda state: state[0] < 3,
            lambda state: (state[0] + 1, state[1] - 0.01 * first(f)(state[1], W)[0]),
            (0, X),
        )[1],
    }
)


@as_meant
def test_while_loop(f):
    def looped(x, w):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, 0.1 * f(s[1], w)), (0, x))[1]

    # JAX has no reverse mode for a loop of unknown length, with or without an op in it.
    with pytest.raises(ValueError, match=r"Reverse-mode differentiation does not work for lax\.while_loop"):
        first(looped)(X, W)
    return looped(X, W), jax.jit(jax.vmap(looped))(XS, WS)


def test_a_second_derivative_of_a_mapped_op_in_a_loop():
    """Before 0.12, JAX drops the rule of a `jax.custom_jvp` there."""
    op = op_custom_gradient(lambda x: (jnp.exp(x), lambda u: u * 7.0 * jnp.exp(x)))

    def looped(x):
        return jax.lax.scan(lambda x, _: (jax.vmap(op)(0.5 * x), None), x, None, 2)[0]

    def pulled(x):
        return jax.vjp(looped, x)[1](jnp.ones_like(x))[0]

    written = jax.make_jaxpr(pulled)(X)

    def again(x):
        return jax.core.eval_jaxpr(written.jaxpr, written.consts, x)[0].sum()

    y = jnp.exp(0.5 * X)
    first, second = 3.5 * y, 3.5 * jnp.exp(0.5 * y)  # the rule's derivatives of both iterations
    close(jax.grad(again)(X), 0.5 * second * first * (first + 1.0))


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


class Spiking(keras.layers.Layer):
    """A layer whose rule alone reads its weight."""

    def build(self, shape):
        self.slope = self.add_weight((), initializer="ones", trainable=False)

    @op_custom_gradient
    def call(self, x):
        return jnp.sign(x), lambda upstream: upstream * 5.0 * self.slope


SLOPE = keras.Variable(1.0, trainable=False)


@op_custom_gradient
def spike(x):
    return jnp.sign(x), lambda upstream: upstream * 5.0 * SLOPE


SPIKES = pytest.mark.parametrize("make", [lambda: spike, Spiking], ids=["function", "layer"])


@SPIKES
@pytest.mark.parametrize(
    "around", [lambda f: f, jax.vmap, jax.checkpoint], ids=["once", "vmap", "checkpoint"]
)
def test_a_rule_alone_reads_a_variable(make, around):
    spiking = make()
    spiking(X)
    function = around(lambda x: spiking(x))
    for compiled in (lambda f: f, multigrad.jit):
        close(compiled(multigrad.grad(lambda x: jnp.sum(function(x))))(X), jnp.full_like(X, 5.0))


PROGRAMS = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, None, 2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) > 0.0, f, lambda x: x, x),
}


@SPIKES
@pytest.mark.parametrize("around", PROGRAMS.values(), ids=PROGRAMS)
def test_a_rule_alone_reads_a_variable_in_an_inner_program(make, around):
    """Its value belongs to the outer program, which JAX cannot pass to the transpose of the inner one."""
    spiking = make()
    spiking(X)
    gradient = multigrad.jit(multigrad.grad(lambda x: jnp.sum(around(lambda x: spiking(x))(x))))
    text = r"the rule reads a variable that the function does not read(.|\n)*got: var"
    with pytest.raises(TypeError, match=text):
        gradient(X)
