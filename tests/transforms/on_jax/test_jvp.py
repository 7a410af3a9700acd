"""`jax.jvp` and functions that use it: the derivative is the transpose of the rule."""

import cases
import jax
import jax.numpy as jnp
import pytest
from support import close

from multigrad import jvp, op_custom_gradient

X, W = jnp.asarray([0.5, -1.25, 1.5]), jnp.asarray([0.75, 1.0, -0.5])
ALONG = jnp.asarray([1.0, -0.5, 2.0]), jnp.asarray([0.25, 1.5, -1.0])

EVERY_FORM = {**cases.CASES, **cases.IN_OTHER_FORMS}
each_case = pytest.mark.parametrize("name", EVERY_FORM)


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
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_mode_uses_the_rule(name, transform, wrap):
    case = EVERY_FORM[name]
    close(jax.jit(transform(wrap(case.op)))(X, W), jax.jit(transform(case.meant))(X, W), 1e-4)


@pytest.mark.parametrize("name", cases.CASES)
def test_forward_mode_in_eager_code(name):
    case = cases.CASES[name]
    for transform in (TRANSFORMS["jvp"], TRANSFORMS["hessian"]):
        close(transform(case.op)(X, W), jax.jit(transform(case.meant))(X, W), 1e-4)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jvp_through_a_loop_that_has_no_reverse_mode(wrap):
    @op_custom_gradient
    def doubled(x):
        return x * 2.0, lambda upstream: 7.0 * upstream

    def function(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100.0, lambda y: y * y, doubled(x))

    y, tangent = wrap(lambda x, t: jvp(function, (x,), (t,)))(X + 2.0, ALONG[0])
    close(y, (2.0 * (X + 2.0)) ** 4)
    close(tangent, 4.0 * (2.0 * (X + 2.0)) ** 3 * 7.0 * ALONG[0])


def test_jvp_of_a_native_rule_raises():
    native = jax.custom_vjp(lambda x: x)
    native.defvjp(lambda x: (x, None), lambda _, upstream: (upstream,))
    with pytest.raises(TypeError, match="custom_vjp"):
        jvp(native, (X,), (X,))
    op = op_custom_gradient(lambda x: (native(x), lambda upstream: 7.0 * upstream))
    close(jvp(op, (X,), (X,))[1], 7.0 * X)
