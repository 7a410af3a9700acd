"""`jax.vmap`, with every kind of axis."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, ONE_FOR_ALL, W, X, all_as_meant, as_meant, each_of
from orders import WS, XS, compiled_orders, first, orders, weighted
from support import close, sizes_made

from multigrad import op_custom_gradient

EACH = each_of({**CASES, "one for all": ONE_FOR_ALL})
AXES = [((0, 0), 0), ((0, None), 1), ((None, 0), -1), ((1, -1), 0), ((-1, None), 1)]
WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "compiled"])


def along(axes):
    """Return arguments that `vmap` maps along these axes."""
    pairs = ((X, XS, axes[0]), (W, WS, axes[1]))
    return [one if axis is None else jnp.moveaxis(many, 0, axis) for one, many, axis in pairs]


@pytest.mark.parametrize("axes", [(0, None), (1, -1)], ids=str)
@as_meant(each=EACH)
def test_derivatives_in_vmap(f, axes):
    """The derivatives of each element."""
    return jax.jit(jax.vmap(orders(f), axes))(*along(axes))


@WRAPS
@pytest.mark.parametrize(("axes", "out_axes"), AXES, ids=str)
@as_meant(each=EACH)
def test_gradients_around_vmap(f, axes, out_axes, wrap):
    """The gradient of an unmapped argument is the sum over the elements."""
    loss = jax.value_and_grad(lambda x, w: weighted(jax.vmap(f, axes, out_axes)(x, w)), (0, 1))
    return wrap(loss)(*along(axes))


def of_a_program(f):
    """The program is differentiated after the call, where the mapped inputs hide that a program is traced."""

    @jax.jit
    def total(x, w):
        gradients = jax.vmap(first(f))(jnp.stack([x, 2.0 * x]), jnp.stack([w, w]))
        return sum(map(weighted, gradients))

    return jax.grad(total, (0, 1))(X, W)


def mean_gradients(f):
    """The mean over the mapped axis, as in data-parallel training."""
    mean = lambda x, w: jax.lax.pmean(first(f)(x, w), "batch")  # noqa: E731
    return jax.vmap(mean, axis_name="batch", out_axes=None)(XS, WS)


test_maps = all_as_meant(
    {
        "a program of mapped gradients": of_a_program,
        "second derivatives around": lambda f: compiled_orders(jax.vmap(f), XS, WS),
        "named axes": mean_gradients,
    },
    each=EACH,
)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_unmapped_output(compiled):
    """The output does not depend on the mapped argument, but its gradient by the rule does."""

    @op_custom_gradient
    def quantized(code, x):
        return code, lambda u: (u, 7.0 * u)

    def total(code, xs):
        op = jax.jit(quantized) if compiled else quantized
        ys = jax.vmap(jax.vmap(op, (None, 0)), (None, 1))(code, xs)
        return weighted(ys)

    xs = jnp.zeros((3, 4, 2))
    of_code, of_xs = jax.grad(total, (0, 1))(X[:2], xs)
    upstream = jnp.cos(jnp.arange(24.0)).reshape(4, 3, 2)
    close(of_code, upstream.sum((0, 1)))
    close(of_xs, 7.0 * upstream.swapaxes(0, 1))
    lowered = jax.jit(total).lower(X[:2], xs).as_text()
    assert "barrier" not in lowered


def test_unmapped_tensors_are_not_broadcast():
    """Only the outputs are. There is one copy of a weight that the elements share."""
    op = op_custom_gradient(lambda x, w: (x * 2.0, lambda u: (u * w.sum(), lambda: 7.0 * w)))

    weight, xs = jnp.ones((300, 300)), jnp.ones((64, 2))
    for mapped in (lambda x: op(x, weight), lambda x: jax.vmap(op, (None, 0))(x, weight).sum(0)):
        assert max(sizes_made(jax.vmap(mapped), xs)) <= weight.size
    assert max(sizes_made(jax.vmap(jax.grad(lambda x: op(x, weight).sum())), xs)) <= weight.size


def test_a_sum_along_a_named_axis():
    """A rule gets the upstream gradient of its element, as of its device."""

    @op_custom_gradient
    def total(x):
        return jax.lax.psum(x, "batch"), lambda u: 7.0 * jax.lax.psum(u, "batch")

    def summed(xs):
        return (jax.vmap(total, axis_name="batch")(xs)[0] * W).sum()

    close(jax.value_and_grad(summed)(XS), ((XS.sum(0) * W).sum(), jnp.stack([7.0 * W] * 4)))


@pytest.mark.parametrize("name", ["batch", 3, None])
def test_a_true_rule(name):
    """One of the outputs depends only on an unmapped argument."""
    op = op_custom_gradient(lambda x, w: ((x * w, w**2), lambda a, b: (a * w, a * x + 2.0 * b * w)))

    def total(function):
        return lambda xs, w: weighted(jax.vmap(function, (0, None), axis_name=name)(xs, w))

    close(jax.grad(total(op), (0, 1))(XS, W), jax.grad(total(lambda x, w: (x * w, w**2)), (0, 1))(XS, W))
