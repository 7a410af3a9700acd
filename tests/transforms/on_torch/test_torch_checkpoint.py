"""torch.utils.checkpoint: the recomputed function uses the rule."""

import functools

import pytest
import torch
from cases import CASES, V, W, X, all_as_meant
from forms import FACTOR, FORMS, WEIGHT, Written, in_form
from support import close
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from vectors import first, leaves, second

ways = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def checkpointed(f, reentrant=False):
    """Return the op between other operations, whose results are recomputed, too."""
    block = lambda x, w: torch.sin(f(x * w, w + 1.0)) * x  # noqa: E731
    return functools.partial(checkpoint, block, use_reentrant=reentrant)


def mapped_second(f):
    x, w = leaves()
    slopes = torch.autograd.grad((checkpointed(f)(x, w) * V).sum(), (x, w), create_graph=True)
    return rows(sum(slopes), x, w)


def rows(y, *xs):
    """Return the Jacobian, by a backward pass that is mapped over upstream gradients."""
    return torch.func.vmap(lambda u: torch.autograd.grad(y, xs, u, retain_graph=True))(torch.eye(3))


test_checkpoints = all_as_meant(
    {
        "reentrant": lambda f: first(checkpointed(f, reentrant=True)),
        "not reentrant": lambda f: first(checkpointed(f)),
        "a second derivative": lambda f: second(checkpointed(f)),
        "a mapped second derivative": mapped_second,
    },
    tolerance=1e-3,
)


@ways
def test_sequential_and_nested_checkpoints(reentrant):
    op = CASES["intermediate"].op
    layers = [lambda x: torch.sin(op(x, W)), lambda x: op(torch.cos(x), W), lambda x: op(x, x)]

    def gradient(function):
        x = X.clone().requires_grad_()
        (function(x) * V).sum().backward()
        return x.grad

    def plain(x):
        for layer in layers:
            x = layer(x)
        return x

    again = functools.partial(functools.partial, checkpoint, use_reentrant=reentrant)
    wanted = gradient(plain)
    close(gradient(lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=reentrant)), wanted)
    close(gradient(again(again(plain))), wanted)


def by_both(x, w, scale):
    """A function whose rule uses its inputs in another order."""
    return scale(x * w), lambda u: (scale(7.0 * u * w), scale(3.0 * u * x)), lambda u: 5.0 * u * x


@pytest.mark.parametrize("form", FORMS)
def test_a_mapped_backward_pass_of_a_checkpoint(form):
    """The second run has no mapped tensors, and saves the same tensors in the same order as the first."""
    op = in_form(form, Written("both", by_both, None)).op
    s = {"function": 1.0, "method": FACTOR}.get(form, WEIGHT)
    x, w = leaves()
    y = checkpoint(lambda *args: torch.sin(op(*args)), x, w, use_reentrant=False)
    slope = s * torch.cos(op(X, W)).detach()
    close(rows(y, x, w), (torch.diag(7.0 * W * slope), torch.diag(3.0 * X * slope)), 1e-4)
