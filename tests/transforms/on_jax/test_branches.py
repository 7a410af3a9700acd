"""`jax.lax.cond` and `jax.lax.switch`, against the branch itself."""

import jax
import jax.numpy as jnp
import pytest
from orders import EACH, WS, XS, W, X, first, orders, same
from support import close


def branches(function):
    return [function, lambda x, w: function(w, x) * x, lambda x, w: jnp.sin(x)]


def switched(function):
    return lambda index, x, w: jax.lax.switch(index, branches(function), x, w)


@EACH
@pytest.mark.parametrize("taken", [True, False])
def test_cond(case, taken):
    yes, no, _ = branches(case.op)
    got = jax.jit(lambda truth, x, w: orders(lambda x, w: jax.lax.cond(truth, yes, no, x, w))(x, w))
    close(got(taken, X, W), orders(branches(case.meant)[0 if taken else 1])(X, W), 1e-4)


@EACH
def test_a_concrete_predicate(case):
    yes, no, _ = branches(case.op)
    close(first(lambda x, w: jax.lax.cond(True, yes, no, x, w))(X, W), first(case.meant)(X, W), 1e-4)


@EACH
def test_branches_that_close_over_their_operands(case):
    def function(x, w):
        return jax.lax.cond(x[0] > 0.0, lambda: case.op(x, w), lambda: x)

    same(function, case.meant)


@EACH
def test_switch(case):
    got = jax.jit(lambda index, x, w: orders(lambda x, w: switched(case.op)(index, x, w))(x, w))
    for index, branch in enumerate(branches(case.meant)):
        close(got(index, X, W), orders(branch)(X, W), 1e-4)


@EACH
def test_one_index_per_element(case):
    indices = [0, 1, 2, 1]

    def mapped(x, w):
        return jax.vmap(switched(case.op))(jnp.asarray(indices), x, w)

    def meant(x, w):
        return jnp.stack([branches(case.meant)[index](x[i], w[i]) for i, index in enumerate(indices)])

    same(mapped, meant, XS, WS)


@EACH
def test_branches_in_a_scan(case):
    def body(x, w):
        return 0.1 * jax.lax.cond(w[0] > 0.0, case.op, lambda x, w: x * w, x, w), None

    got = jax.jit(lambda x, ws: first(lambda x, ws: jax.lax.scan(body, x, ws)[0])(x, ws))(X, WS)
    # The branches of the plain loop depend on values, which a gradient with respect to `ws` would trace.
    signs = [bool(w[0] > 0.0) for w in WS]

    def unrolled(x, ws):
        for positive, w in zip(signs, ws, strict=True):
            x = 0.1 * (case.meant(x, w) if positive else x * w)
        return x

    close(got, first(unrolled)(X, WS), 1e-4)
