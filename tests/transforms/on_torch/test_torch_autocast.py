"""Autocast: a rule runs in the context of its function."""

import functools

import numpy as np
import pytest
import torch
from support import numpy

from multigrad import op_custom_gradient
from multigrad.ops import linear_cross_entropy

OFF = functools.partial(torch.autocast, "cpu", enabled=False)
BFLOAT16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
FLOAT16 = functools.partial(torch.autocast, "cpu", dtype=torch.float16)
contexts = [pytest.param(OFF, id="off"), pytest.param(BFLOAT16, id="b"), pytest.param(FLOAT16, id="f")]


@op_custom_gradient
def product(x, w):
    h = x @ w  # in the dtype of autocast
    return h, lambda u: (u @ w.T, 3.0 * (x.T @ (u + h)))


class NativeProduct(torch.autograd.Function):
    """The same with `torch.autograd.Function`."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        h = x @ w
        ctx.save_for_backward(x, w, h)
        return h

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, u):
        x, w, h = ctx.saved_tensors
        return u @ w.T, 3.0 * (x.T @ (u + h))


def under_autocast(f, forward, backward, vjp=None):
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with forward():
        y, pull = vjp(f, x, w) if vjp else (f(x, w), None)
    with backward():
        upstream = y.detach() * 2.0
        return pull(upstream) if vjp else torch.autograd.grad(y, (x, w), upstream)


@pytest.mark.parametrize("vjp", [None, torch.func.vjp])
@pytest.mark.parametrize("forward", contexts)
@pytest.mark.parametrize("backward", contexts)
def test_a_rule_runs_under_the_autocast_of_its_function(forward, backward, vjp):
    """The results equal those of `custom_fwd` and `custom_bwd`, wherever the backward pass runs."""
    got = under_autocast(product, forward, backward, vjp)
    wanted = under_autocast(NativeProduct.apply, forward, backward)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("forward", contexts)
@pytest.mark.parametrize("backward", contexts)
def test_autocast_that_is_disabled_in_a_part(forward, backward):
    """The innermost context applies, around the function and around the backward pass."""
    got = under_autocast(lambda x, w: _under(forward, product, x, w), BFLOAT16, backward)
    wanted = under_autocast(NativeProduct.apply, forward, backward)
    assert all(map(torch.equal, got, wanted))


def _under(context, f, *args):
    with context():
        return f(*args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("forward", contexts)
def test_autocast_in_fullgraph_compilation(forward, backend):
    compiled = torch.compile(lambda x, w: _under(forward, product, x, w), fullgraph=True, backend=backend)
    got = under_autocast(compiled, OFF, OFF)
    wanted = under_autocast(product, forward, OFF)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=1e-2)


@pytest.mark.parametrize("vjp", [None, torch.func.vjp])
def test_a_second_derivative_through_autocast(vjp):
    @op_custom_gradient
    def op(x):
        e = x @ torch.tensor([[2.0], [4.0]])
        return e * 1.0, lambda u: 7.0 * (u * e) @ torch.tensor([[2.0, 4.0]])

    def first(x):
        if vjp is None:
            with BFLOAT16():
                y = op(x)
            return torch.autograd.grad(y.float().sum(), x, create_graph=True)[0]
        with BFLOAT16():
            y, pull = vjp(op, x)
        return pull(torch.ones_like(y))[0]

    x = torch.tensor([[1.0, 0.5]], requires_grad=True)
    got = first(x)
    assert got.dtype == torch.float32
    assert got.tolist() == [[56.0, 112.0]]
    if vjp is None:
        (second,) = torch.autograd.grad(got[0, 0], x)
    else:
        second = torch.func.grad(lambda x: first(x)[0, 0])(x)
    assert second.tolist() == [[28.0, 56.0]]


def test_a_reduced_loss_of_many_tokens_under_autocast_to_float16():
    """The gradients are small without the scale of the loss, which is applied only in the backward pass."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(4096, 8, generator=generator), 0.1 * torch.randn(8, 2000, generator=generator)
    y = torch.randint(0, 2000, (4096,), generator=generator)

    def gradient(cast):
        kernel = w.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=cast):
            loss = linear_cross_entropy(x, kernel, y, reduction="mean")
        (2.0**16 * loss).backward()
        return kernel.grad / 2.0**16

    wanted = gradient(False)
    assert (gradient(True) - wanted).norm() < 1e-3 * wanted.norm()
