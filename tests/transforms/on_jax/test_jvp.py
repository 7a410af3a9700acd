"""`jax.jvp` and functions that use it: an error or the derivative by the rule, depending on the option."""

import runpy
import sys

import cases
import jax
import jax.numpy as jnp
import pytest
from support import close

import multigrad

X, W = jnp.asarray([0.5, -1.25, 1.5]), jnp.asarray([0.75, 1.0, -0.5])
ALONG = jnp.asarray([1.0, -0.5, 2.0]), jnp.asarray([0.25, 1.5, -1.0])


def in_both_modes():
    """Return the cases with ops that are defined with `forward_mode=True`."""
    define = multigrad.op_custom_gradient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multigrad, "op_custom_gradient", lambda f: define(f))
        patch.delitem(sys.modules, "forms")
        defined = runpy.run_path(cases.__file__)
        return {**defined["CASES"], **defined["IN_OTHER_FORMS"]}


BOTH_MODES = in_both_modes()
IN_REVERSE_MODE = {**cases.CASES, **cases.IN_OTHER_FORMS}
each_case = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in (*cases.CASES, "intermediate-method that reads") else pytest.mark.slow
        )
        for name in BOTH_MODES
    ],
)


@each_case
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jvp_without_forward_mode_raises(name, wrap):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(wrap(IN_REVERSE_MODE[name].op), (X, W), ALONG)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(wrap(IN_REVERSE_MODE[name].op))(X, W)


def total(function):
    return lambda x, w: (function(x, w) * jnp.asarray([1.0, -2.0, 0.5])).sum()


TRANSFORMS = {
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), ALONG),
    "jvp of jvp": lambda f: TRANSFORMS["jvp"](TRANSFORMS["jvp"](f)),
    "grad of jvp": lambda f: jax.grad(total(lambda x, w: TRANSFORMS["jvp"](f)(x, w)[1]), (0, 1)),
    "hessian": lambda f: jax.hessian(total(f), (0, 1)),
    "linearize": lambda f: lambda x, w: jax.vmap(jax.linearize(f, x, w)[1])(jnp.eye(3), jnp.eye(3)),
}


@each_case
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_jvp_with_forward_mode_uses_the_rule(name, transform):
    got = jax.jit(transform(BOTH_MODES[name].op))(X, W)
    close(got, jax.jit(transform(BOTH_MODES[name].meant))(X, W), 1e-4)
