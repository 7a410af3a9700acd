"""`jax.checkpoint` with each of its policies."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, W, X, all_as_meant, as_meant
from jax.ad_checkpoint import checkpoint_name
from orders import WITHOUT_WEIGHTS, compiled_orders, orders

from multigrad import op_custom_gradient

save = jax.checkpoint_policies
POLICIES = {
    "everything": save.everything_saveable,
    "nothing": save.nothing_saveable,
    "dots": save.dots_saveable,
    "these names": save.save_only_these_names("result"),
    "any names but": save.save_any_names_but_these("result"),
    "of two": save.save_from_both_policies(save.dots_saveable, save.save_only_these_names("result")),
    "offload dots": save.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload names": save.save_and_offload_only_these_names(
        names_which_can_be_saved=["result"],
        names_which_can_be_offloaded=["other"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def block(function):
    """Return the op between other operations, with a named result."""
    return lambda x, w: checkpoint_name(function(jnp.sin(x), w), "result") * jnp.cos(w)


def in_a_scan(f):
    body = jax.checkpoint(f, prevent_cse=False)
    return lambda x, w: jax.lax.scan(lambda carry, _: (0.1 * body(carry, w), None), x, None, 3)[0]


test_checkpoints = all_as_meant(
    {
        "in jit": lambda f: compiled_orders(jax.checkpoint(block(f))),
        "in eager code": lambda f: orders(jax.checkpoint(block(f)))(X, W),
        "in a scan": lambda f: compiled_orders(in_a_scan(f)),
    }
)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@as_meant(each=pytest.mark.parametrize("case", [CASES["intermediate"], CASES["output"]]))
def test_policies(f, policy):
    return compiled_orders(jax.checkpoint(block(f), policy=policy))


@as_meant(each=WITHOUT_WEIGHTS)
def test_checkpoints_in_an_op(f):
    @op_custom_gradient
    def outer(x, w):
        y = jax.checkpoint(f)(x, w)
        return y, lambda u: (u * 3.0 * y, u * 5.0 * x)

    return compiled_orders(outer)


@pytest.mark.parametrize(("policy", "saved"), [(None, []), (save.save_only_these_names("e"), ["named 'e'"])])
def test_saved_residuals(policy, saved, capsys):
    """A residual is saved if the policy saves it, and nothing else."""

    @op_custom_gradient
    def op(x):
        e = checkpoint_name(jnp.exp(x), "e")
        return e * 2.0, lambda u: u * e * 7.0

    jax.ad_checkpoint.print_saved_residuals(lambda x: jax.checkpoint(op, policy=policy)(x).sum(), X)
    lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
    assert len(lines) == len(saved), lines
    if jax.__version_info__ >= (0, 10):  # older versions print no names
        assert all(name in line for name, line in zip(saved, lines, strict=True)), lines
