"""`jax.linearize`, `jax.vjp` and `jax.jacrev`: one run, several directions."""

import jax
import jax.numpy as jnp
from orders import EACH, W, X, first
from support import close

from multigrad import op_custom_gradient


@EACH
def test_vjp(case):
    for function, meant in ((case.op, case.meant), (first(case.op), first(case.meant))):
        got, pull = jax.vjp(function, X, W)
        wanted, pull_meant = jax.vjp(meant, X, W)
        close(got, wanted, 1e-4)
        upstream = jax.tree.map(lambda y: jnp.stack([y, 2.0 - y]), wanted)
        close(jax.vmap(pull)(upstream), jax.vmap(pull_meant)(upstream), 1e-4)


@EACH
def test_jacobians(case):
    def jacobian(function):
        return jax.jacrev(function, (0, 1))

    close(jacobian(case.op)(X, W), jacobian(case.meant)(X, W), 1e-4)
    twice = jax.jit(jacobian(jacobian(case.op)))
    close(twice(X, W), jacobian(jacobian(case.meant))(X, W), 1e-4)


def test_linearize():
    def function(x):
        e = x**2
        return e * x, lambda u: u * 21.0 * e

    value, push = jax.linearize(op_custom_gradient(function), X)
    close((value, push(W)), (X**3, 21.0 * X**2 * W))
