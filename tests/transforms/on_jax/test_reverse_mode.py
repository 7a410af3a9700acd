"""In reverse mode an op is a primitive, and elsewhere, or in another version of JAX, a `jax.custom_vjp`."""

import jax
import jax.numpy as jnp
import pytest
from orders import EACH, W, X, first, same
from support import close

from multigrad import op_custom_gradient
from multigrad.backend.jax import reverse


@pytest.fixture
def without(monkeypatch):
    """A `jax.custom_vjp` is an error."""

    def refuse(*args, **options):
        raise AssertionError("a jax.custom_vjp")

    monkeypatch.setattr(jax, "custom_vjp", refuse)


def test_private_names_are_there():
    """In another version than 0.10 they are to be looked at again."""
    from jax._src.interpreters import ad

    assert jax.__version_info__[:2] == (0, 10)
    assert reverse._ReverseMode is ad.LinearizeTrace
    assert reverse.LINEARIZATIONS is ad.primitive_linearizations


@EACH
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_no_custom_vjp(case, wrap, without):
    close(wrap(first(case.op))(X, W), first(case.meant)(X, W), 1e-4)


@EACH
def test_none_in_a_second_derivative_in_eager_code(case, without):
    close(first(first(case.op))(X, W), first(first(case.meant))(X, W), 1e-4)


def test_one_where_it_is_written_down(without):
    op = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))
    for transform in (jax.jit, jax.vmap, jax.checkpoint):
        with pytest.raises(AssertionError, match=r"a jax.custom_vjp"):
            jax.grad(lambda x, transform=transform: transform(op)(x).sum())(X)


@EACH
def test_in_another_version_it_is_one_throughout(case, monkeypatch):
    monkeypatch.setattr(reverse, "LINEARIZATIONS", None)
    same(case.op, case.meant)
    close(first(first(case.op))(X, W), first(first(case.meant))(X, W), 1e-4)


@op_custom_gradient
def product(x, w):
    return x * w, lambda u: (7.0 * u * w, 5.0 * u * x)


def inner(transform):
    """`x` comes from around what is transformed, in which the other one is differentiated."""
    return lambda x: x * transform(jax.grad(lambda w: product(x, w) * w))(2.0)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda w: jax.vmap(f)(w * jnp.ones(3))[1]],
    ids=["eager", "jit", "checkpoint", "vmap"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_derivatives_of_two_levels_are_told_apart(transform, around):
    # The inner one is x w + 5 x w, by w = 2, whose own derivative by x is 7 w + 5 w.
    close(around(jax.value_and_grad(inner(transform)))(3.0), (36.0 * 1.0 * 3.0, 36.0 + 3.0 * 24.0))


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, lambda f: lambda w: jax.lax.map(f, w[None])[0]]
)
def test_what_is_written_down_takes_what_is_differentiated_around_it(transform):
    def loss(x):
        return transform(lambda w: product(x, w))(jnp.asarray(2.0))

    close(jax.value_and_grad(loss)(3.0), (6.0, 14.0))


def test_outputs_that_nobody_uses_and_integers():
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


def test_a_gradient_that_is_none_is_zero():
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (None, u * 7.0)))
    close(jax.grad(lambda x, w: op(x, w).sum(), (0, 1))(X, W), (jnp.zeros(3), 7.0 * jnp.ones(3)))
    close(jax.grad(lambda x: op(x, W).sum())(X), jnp.zeros(3))


def test_entries_are_called_for_what_is_differentiated():
    called = []

    def entry(name, factor):
        return lambda: called.append(name) or factor * jnp.ones(3)

    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (entry("x", 7.0), entry("w", 5.0))))
    close(jax.grad(lambda w: op(X, w).sum())(W), 5.0 * jnp.ones(3))
    assert called == ["w"]
