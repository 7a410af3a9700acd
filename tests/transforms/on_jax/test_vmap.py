"""`jax.vmap`, with every kind of axis, beside the loop."""

import jax
import jax.numpy as jnp
import pytest
from cases import BY_THE_RULE_ALONE, CASES, ONE_FOR_ALL
from orders import WS, XS, W, X, each_with, first, orders, same, weighted
from support import close, sizes_made

from multigrad import op_custom_gradient

EVERY = {**CASES, "one for all": ONE_FOR_ALL}
EACH = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
AXES = [((0, 0), 0), ((0, None), 1), ((None, 0), -1), ((1, -1), 0), ((-1, None), 1)]


def along(axes):
    """Arguments that `vmap` is to map along these axes."""
    pairs = ((X, XS, axes[0]), (W, WS, axes[1]))
    return [one if axis is None else jnp.moveaxis(many, 0, axis) for one, many, axis in pairs]


def loop(function, axes, out_axes):
    """What `jax.vmap` is to give."""

    def mapped(x, w):
        def slice_of(value, axis, i):
            return value if axis is None else jnp.moveaxis(value, axis, 0)[i]

        answers = [function(slice_of(x, axes[0], i), slice_of(w, axes[1], i)) for i in range(len(XS))]
        return jax.tree.map(lambda *parts: jnp.stack(parts, out_axes), *answers)

    return mapped


@each_with("axes", {"(0, None)": (0, None), "(1, -1)": (1, -1)}, ["(0, None)"], EVERY)
def test_derivatives_within(case, axes):
    """Each element's own derivatives."""
    got = jax.jit(jax.vmap(orders(case.op), axes))(*along(axes))
    close(got, loop(orders(case.meant), axes, 0)(*along(axes)), 1e-4)


@each_with("along_axes", {str(axes): axes for axes in AXES}, [str(AXES[1])], EVERY, ("one for all",))
def test_gradients_of_the_whole(case, along_axes):
    """An argument that is not mapped gets the sum over the elements."""
    axes, out_axes = along_axes
    got = jax.value_and_grad(lambda x, w: weighted(jax.vmap(case.op, axes, out_axes)(x, w)), (0, 1))
    wanted = jax.value_and_grad(lambda x, w: weighted(loop(case.meant, axes, out_axes)(x, w)), (0, 1))
    for wrap in (lambda f: f, jax.jit):
        close(wrap(got)(*along(axes)), wanted(*along(axes)), 1e-4)


@EACH
def test_second_derivatives_of_the_whole(case):
    same(jax.vmap(case.op), loop(case.meant, (0, 0), 0), XS, WS)


@EACH
def test_one_within_another(case):
    def all_pairs(function):
        return jax.vmap(jax.vmap(function, (None, 0)), (0, None), 1)

    close(
        jax.jit(first(all_pairs(case.op)))(XS, WS),
        first(loop(loop(case.meant, (None, 0), 0), (0, None), 1))(XS, WS),
        1e-4,
    )


@EACH
def test_named_axes(case):
    """The mean over the mapped axis, as in data-parallel training."""

    def mean_gradients(function):
        return lambda x, w: jax.lax.pmean(first(function)(x, w), "batch")

    got = jax.vmap(mean_gradients(case.op), axis_name="batch", out_axes=None)(XS, WS)
    each = loop(first(case.meant), (0, 0), 0)(XS, WS)
    close(got, jax.tree.map(lambda gradients: gradients.mean(0), each), 1e-4)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_output_that_is_one_for_all(compiled, forward_mode):
    """It does not depend on what is mapped; the rule's gradients all the same, as in vector quantization."""

    @op_custom_gradient(forward_mode=forward_mode)
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


@pytest.mark.parametrize("case", BY_THE_RULE_ALONE)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "compiled"])
def test_what_the_rule_alone_depends_on(case, wrap):
    """Each element has its own upstream gradient, although all have one output."""
    op, beside, each = BY_THE_RULE_ALONE[case]
    weights = jnp.array([1.0, 10.0, 100.0])

    def total(x):
        return (jax.vmap(wrap(op), (None, 0))(x, jnp.array(beside)) * weights).sum()

    def squares(x):
        derivatives = jax.vmap(wrap(jax.grad(lambda x, m: op(x, m) * x)), (None, 0))(x, jnp.array(beside))
        return (derivatives * weights).sum()

    x = jnp.float32(2.0)
    wanted = (jnp.array(each) * weights).sum()
    close(wrap(jax.grad(total))(x), wanted)
    # The derivative of y + x y' is y' + y' + x y'', of which the last is zero.
    close(wrap(jax.grad(squares))(x), 2.0 * wanted)


def test_what_is_not_mapped_is_not_made_as_large():
    """The outputs alone are: of a weight that one element after the other uses there is one."""
    op = op_custom_gradient(lambda x, w: (x * 2.0, lambda u: (u * w.sum(), lambda: 7.0 * w)))

    weight, xs = jnp.ones((300, 300)), jnp.ones((64, 2))
    for mapped in (lambda x: op(x, weight), lambda x: jax.vmap(op, (None, 0))(x, weight).sum(0)):
        assert max(sizes_made(jax.vmap(mapped), xs)) <= weight.size
    assert max(sizes_made(jax.vmap(jax.grad(lambda x: op(x, weight).sum())), xs)) <= weight.size


def test_a_sum_along_a_named_axis():
    """A rule sees the upstream gradient of its own element, as it does of its own device."""

    @op_custom_gradient
    def total(x):
        return jax.lax.psum(x, "batch"), lambda u: 7.0 * jax.lax.psum(u, "batch")

    def summed(xs):
        return (jax.vmap(total, axis_name="batch")(xs)[0] * W).sum()

    close(jax.value_and_grad(summed)(XS), ((XS.sum(0) * W).sum(), jnp.stack([7.0 * W] * 4)))


@pytest.mark.parametrize("name", ["batch", 3, None])
def test_a_rule_that_is_true(name):
    """One of the outputs depends on what is not mapped alone."""
    op = op_custom_gradient(lambda x, w: ((x * w, w**2), lambda a, b: (a * w, a * x + 2.0 * b * w)))

    def total(function):
        return lambda xs, w: weighted(jax.vmap(function, (0, None), axis_name=name)(xs, w))

    close(jax.grad(total(op), (0, 1))(XS, W), jax.grad(total(lambda x, w: (x * w, w**2)), (0, 1))(XS, W))
