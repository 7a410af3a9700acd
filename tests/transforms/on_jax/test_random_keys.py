"""Random keys as arguments of an op."""

import jax
import pytest
from support import array, close

from multigrad import op_custom_gradient

X = array(1.0, 2.0)


def test_random_keys_are_used_once():
    @op_custom_gradient
    def op(x, key):
        noise = jax.random.normal(key, x.shape)
        return x * noise, lambda u: (u * noise * 7.0, None)

    wanted = 7.0 * jax.random.normal(jax.random.key(0), (2,))

    def first(x, key):
        return jax.grad(lambda x: op(x, key).sum())(x)

    with jax.debug_key_reuse(True):
        close(jax.jit(first)(X, jax.random.key(0)), wanted)
        close(jax.grad(jax.jit(lambda x, key: op(x, key).sum()))(X, jax.random.key(0)), wanted)
        close(jax.jit(jax.vmap(first, (0, None)))(X[None], jax.random.key(0))[0], wanted)
    second = jax.grad(lambda x, key: (first(x, key) * x).sum())  # runs again for the noise
    close(jax.jit(second)(X, jax.random.key(0)), wanted)
    with jax.debug_key_reuse(True):
        if jax.__version_info__ >= (0, 10):  # JAX 0.7 does not see that the key is used twice
            with pytest.raises(jax.errors.KeyReuseError):
                jax.jit(second)(X, jax.random.key(0))


def test_a_second_derivative_uses_a_random_key_once_for_a_rule_of_inputs():
    op = op_custom_gradient(lambda x, key: (x * jax.random.normal(key), lambda u: (u * 7.0 * x**2, None)))
    second = jax.grad(jax.grad(op))
    with jax.debug_key_reuse(True):
        for compiled in (lambda f: f, jax.jit):
            close(compiled(second)(2.0, jax.random.key(0)), 28.0)
