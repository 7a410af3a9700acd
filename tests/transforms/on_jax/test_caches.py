"""The caches of JAX: an op that is defined in every call leaves no objects."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from cases import X
from orders import first
from support import close

from multigrad import op_custom_gradient

USES = {
    "grad": lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.ones_like(x))[0],
    "jit": lambda f: jax.jit(USES["grad"](f)),
    "vmap": lambda f: lambda x: jax.vmap(USES["grad"](f))(x[None])[0],
    "checkpoint": lambda f: USES["grad"](jax.checkpoint(f)),
    "grad of grad": lambda f: lambda x: first(lambda x, _: USES["grad"](f)(x))(x, x)[0] * 0.0 + 7.0,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_op_that_is_defined_in_every_call(use):
    alive = weakref.WeakSet()

    def call(scale):
        def f(x):
            e = jnp.exp(x)
            return e * scale, lambda u: u * 7.0 + 0.0 * e

        alive.add(f)
        close(use(op_custom_gradient(f))(X), jnp.full(3, 7.0))

    def objects_after(calls):
        for scale in range(calls):
            call(float(scale))
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(4)
    # JAX itself keeps one or two weak references per transform of a new function. A leak would keep the
    # function, its cells and its traces. JAX 0.7 keeps about 30 objects of each op, and 200 of a checkpoint
    # even without an op. The function and its arrays are not among them.
    after = objects_after(8)
    assert after - before < 8 * 5 or jax.__version_info__ < (0, 9)
    assert len(alive) <= 1
