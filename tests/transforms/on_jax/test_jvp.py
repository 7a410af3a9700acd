"""`jax.jvp`, `linearize`, `vjp` and `jacrev`: the derivative is the transpose of the rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, IN_OTHER_FORMS, W, X, as_meant, weighted
from orders import first
from support import array, close

from multigrad import jvp, op_custom_gradient

ALONG = array(1.0, -0.5, 2.0), array(0.25, 1.5, -1.0)
EVERY_FORM = {**CASES, **IN_OTHER_FORMS}
each_form = pytest.mark.parametrize("case", EVERY_FORM.values(), ids=EVERY_FORM)
each_wrap = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])

TRANSFORMS = {
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), ALONG),
    "jvp of jvp": lambda f: TRANSFORMS["jvp"](TRANSFORMS["jvp"](f)),
    "grad of jvp": lambda f: jax.grad(weighted(lambda x, w: TRANSFORMS["jvp"](f)(x, w)[1]), (0, 1)),
    "hessian": lambda f: jax.hessian(weighted(f), (0, 1)),
    "linearize": lambda f: lambda x, w: jax.vmap(jax.linearize(f, x, w)[1])(jnp.eye(3), jnp.eye(3)),
    "vjp": lambda f: lambda x, w: jax.vmap(jax.vjp(f, x, w)[1])(jnp.eye(3)),
    "vjp of grad": lambda f: lambda x, w: jax.vjp(first(f), x, w)[1]((x, w)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@each_wrap
@as_meant(each=each_form)
def test_forward_mode_and_jacobians_use_the_rule(f, transform, wrap):
    return jax.jit(transform(wrap(f)))(X, W)


@pytest.mark.parametrize("name", ["jvp", "hessian", "jacrev"])
@as_meant(each=pytest.mark.parametrize("case", CASES.values(), ids=CASES))
def test_eager_code(f, name):
    return TRANSFORMS[name](f)(X, W)


def test_integers_and_complex_numbers():
    @op_custom_gradient
    def op(z, index):
        return (z * 2j, index + 1), lambda U: (U[0] * -2j * 7.0, None)

    index = jnp.asarray([1, 2])
    z = jnp.asarray([1.0 + 1.0j, 2.0])
    (out, following), (pushed, _) = jax.jvp(lambda z: op(z, index), (z,), (jnp.ones(2, "complex64"),))
    close((out, following), (z * 2j, index + 1))
    close(pushed, 14j * jnp.ones(2, "complex64"))


def test_host_code_in_a_rule_names_the_op():
    @op_custom_gradient
    def named(x):
        return x * 2.0, lambda u: jax.pure_callback(lambda u: np.asarray(u) * 7.0, u, u)

    close(jax.grad(named)(1.0), 7.0)
    with pytest.raises(ValueError, match="callback") as error:
        jax.jvp(named, (1.0,), (1.0,))
    assert "named: forward mode computes the transpose of the rule" in "".join(error.value.__notes__)


@each_wrap
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
