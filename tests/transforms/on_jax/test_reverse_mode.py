"""In reverse mode an op is a primitive. Elsewhere, or in another version of JAX, it is a `jax.custom_vjp`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from cases import CASES
from orders import EACH, W, X, first, same
from support import close

from multigrad import op_custom_gradient
from multigrad.backend.jax import op

if not op.REVERSE_IS_KNOWN:
    pytest.skip("the primitive is for JAX 0.10 alone", allow_module_level=True)
from multigrad.backend.jax import reverse


@pytest.fixture
def without(monkeypatch):
    """Make every `jax.custom_vjp` raise."""

    def refuse(*args, **options):
        raise AssertionError("a jax.custom_vjp")

    monkeypatch.setattr(jax, "custom_vjp", refuse)


def test_the_version_was_checked():
    """In another version, check the private names, and what JAX does with them."""
    assert op.REVERSE_IS_KNOWN
    assert issubclass(reverse.LinearizeTrace, jax.core.Trace)
    assert reverse.primitive_linearizations[reverse._op_p] is reverse._linearized


IN_ANOTHER_VERSION = """
import sys
import jax
import jax.extend.core
jax.__version_info__ = (0, 9, 9)
del jax.extend.core.set_current_trace
import multigrad
op = multigrad.op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0 * x))
print(float(jax.grad(op)(3.0)), float(jax.grad(jax.grad(op))(3.0)))
assert "multigrad.backend.jax.reverse" not in sys.modules
"""


def test_another_version_does_not_use_the_primitive():
    words = [sys.executable, "-c", IN_ANOTHER_VERSION]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() == ["21.0", "7.0"]


@pytest.mark.parametrize("name", [name for name in CASES if name != "an op"])  # which jit traces
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_eager_code_uses_no_custom_vjp(name, wrap, without):
    case = CASES[name]
    close(wrap(first(case.op))(X, W), first(case.meant)(X, W), 1e-4)


@EACH
def test_a_second_derivative_in_eager_code_uses_no_custom_vjp(case, without):
    close(first(first(case.op))(X, W), first(first(case.meant))(X, W), 1e-4)


def test_traced_code_uses_a_custom_vjp(without):
    for transform in (jax.jit, jax.vmap, jax.checkpoint):
        with pytest.raises(AssertionError, match=r"a jax.custom_vjp"):
            jax.grad(lambda x, transform=transform: transform(double)(x).sum())(X)


@EACH
def test_without_reverse_mode_it_is_a_custom_vjp(case, monkeypatch):
    monkeypatch.setattr(op, "REVERSE_IS_KNOWN", False)
    same(case.op, case.meant)
    close(first(first(case.op))(X, W), first(first(case.meant))(X, W), 1e-4)


@op_custom_gradient
def product(x, w):
    return x * w, lambda u: (7.0 * u * w, 5.0 * u * x)


def inner(transform):
    """Transform a function that closes over `x`, which is differentiated outside."""
    return lambda x: x * transform(jax.grad(lambda w: product(x, w) * w))(2.0)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda w: jax.vmap(f)(w * jnp.ones(3))[1]],
    ids=["eager", "jit", "checkpoint", "vmap"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_derivatives_of_two_levels_are_separate(transform, around):
    # The inner derivative is x w + 5 x w for w = 2. Its derivative with respect to x is 7 w + 5 w.
    close(around(jax.value_and_grad(inner(transform)))(3.0), (3.0 * 36.0, 36.0 + 3.0 * 24.0))


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, lambda f: lambda w: jax.lax.map(f, w[None])[0]]
)
def test_traced_code_uses_tracers_of_outer_derivatives(transform):
    def loss(x):
        return transform(lambda w: product(x, w))(jnp.asarray(2.0))

    close(jax.value_and_grad(loss)(3.0), (6.0, 14.0))


def test_unused_and_integer_outputs():
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


def test_a_gradient_of_none_is_zero():
    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (None, u * 7.0)))
    close(jax.grad(lambda x, w: op(x, w).sum(), (0, 1))(X, W), (jnp.zeros(3), 7.0 * jnp.ones(3)))
    close(jax.grad(lambda x: op(x, W).sum())(X), jnp.zeros(3))


def test_lazy_entries_are_called_for_differentiated_arguments():
    called = []

    def entry(name, factor):
        return lambda: called.append(name) or factor * jnp.ones(3)

    op = op_custom_gradient(lambda x, w: (x * w, lambda u: (entry("x", 7.0), entry("w", 5.0))))
    close(jax.grad(lambda w: op(X, w).sum())(W), 5.0 * jnp.ones(3))
    assert called == ["w"]


@pytest.mark.parametrize("known", [True, False], ids=["primitive", "custom_vjp"])
def test_closed_over_values_are_arrays(known, monkeypatch):
    """Also a Python number that is differentiated outside of the op."""
    monkeypatch.setattr(op, "REVERSE_IS_KNOWN", known)

    def function(x, y):
        @op_custom_gradient
        def scaled(x):
            return x * y.astype("float32") + y.ndim, lambda u: u * 7.0 * y

        return scaled(x)

    close(jax.grad(function, (0, 1))(3.0, 2.0), (14.0, 0.0))


USES = {
    "eager": lambda push: push(X),
    "jit": lambda push: jax.jit(push)(X),
    "vmap": lambda push: jax.vmap(push)(X[None]),
    "map": lambda push: jax.lax.map(push, X[None]),
    "jit of it all": lambda push: jax.jit(lambda x: jax.linearize(double, x)[1](x))(X),
}

double = op_custom_gradient(lambda x: (x * 2.0, lambda u: u * 7.0))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_linearized_function_is_in_forward_mode(use):
    with pytest.raises(TypeError, match=r"no forward-mode derivative(.|\n)*fix"):
        use(jax.linearize(double, X)[1])


@pytest.mark.parametrize("known", [True, False], ids=["primitive", "custom_vjp"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_closed_over_ref_stays_a_ref(wrap, known, monkeypatch):
    monkeypatch.setattr(op, "REVERSE_IS_KNOWN", known)

    def loss(x):
        ref = jax.new_ref(2.0 * x)

        @op_custom_gradient
        def own(x):
            before = ref[...]
            ref[...] = x
            return x * before, lambda u: u * 7.0

        return own(x).sum()

    close(wrap(jax.grad(loss))(X), 7.0 * jnp.ones(3))


@pytest.mark.parametrize("known", [True, False], ids=["primitive", "custom_vjp"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_python_number_as_a_cotangent(wrap, known, monkeypatch):
    monkeypatch.setattr(op, "REVERSE_IS_KNOWN", known)
    both = op_custom_gradient(lambda x: ((x * 2.0, x * 3.0), lambda u: u[0] * 7.0 + u[1] * 5.0))
    turned = op_custom_gradient(lambda x: (x * 1j, lambda u: u * 7.0))
    close(wrap(lambda x: jax.vjp(double, x)[1](1.0)[0])(X[0]), 7.0)
    close(wrap(lambda x: jax.vjp(both, x)[1]((1.0, 2.0))[0])(X[0]), 17.0)
    close(wrap(lambda x: jax.vjp(turned, x + 0j)[1](1.0 + 0j)[0])(X[0]), 7.0 + 0j)
    close(wrap(lambda x: jax.linear_transpose(jax.linearize(double, x)[1], x)(1.0)[0])(X[0]), 7.0)


@jax.custom_jvp
def number(x):
    return 3.0


number.defjvp(lambda primals, tangents: (number(*primals), 2.0 * tangents[0]))


@pytest.mark.parametrize("known", [True, False], ids=["primitive", "custom_vjp"])
def test_a_python_number_under_vmap(known, monkeypatch):
    """An operation before an op may return a Python number, which JAX treats as an array."""
    monkeypatch.setattr(op, "REVERSE_IS_KNOWN", known)
    own = op_custom_gradient(lambda x: (x * x, lambda u: u * x.ndim + u * 7.0))
    close(jax.vmap(lambda x: own(number(x)))(X), 9.0 * jnp.ones(3))
    close(jax.vmap(jax.grad(lambda x: own(number(x))))(X), 14.0 * jnp.ones(3))
