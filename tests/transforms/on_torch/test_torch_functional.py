"""torch.autograd: its functional API, double backward by `backward`, and its numerical checks."""

import pytest
import torch
from cases import each_of, weighted
from support import close
from torch.autograd import functional

X, W, V = torch.tensor([[0.5, -1.25, 1.5], [0.75, 1.0, -0.5], [1.0, -2.0, 0.5]])

cases = each_of()


def curved(f):
    """Return the function plus a term with a second derivative."""
    return lambda x, w: f(torch.sin(x), w**2)


FUNCTIONAL = {
    "vjp": lambda f: functional.vjp(f, (X, W), V),
    "jvp": lambda f: functional.jvp(f, (X, W), (V, X)),
    "jacobian": lambda f: functional.jacobian(f, (X, W)),
    "jacobian, vectorized": lambda f: functional.jacobian(f, (X, W), vectorize=True),
    "jacobian, forward mode": lambda f: functional.jacobian(
        f, (X, W), vectorize=True, strategy="forward-mode"
    ),
    "hessian": lambda f: functional.hessian(weighted(f), (X, W)),
    "hessian, vectorized": lambda f: functional.hessian(weighted(f), (X, W), vectorize=True),
    "hessian, forward over reverse": lambda f: functional.hessian(
        weighted(f), (X, W), vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "hvp": lambda f: functional.hvp(weighted(f), (X, W), (V, X)),
    "vhp": lambda f: functional.vhp(weighted(f), (X, W), (V, X)),
    "a gradient of a jacobian": lambda f: gradients(
        lambda x, w: functional.jacobian(curved(f), (x, w), create_graph=True)
    ),
    "a gradient of a vjp": lambda f: gradients(
        lambda x, w: functional.vjp(curved(f), (x, w), V, create_graph=True)[1]
    ),
    "a gradient by backward": lambda f: gradients(lambda x, w: [f(x, w)]),
}


def gradients(function):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    sum([(y**2).sum() for y in function(x, w)]).backward()
    return x.grad, w.grad


@cases
@pytest.mark.parametrize("transform", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_functional(case, transform):
    close(transform(case.op), transform(case.meant), 1e-4)


@cases
@pytest.mark.parametrize("batched", [False, True])
def test_many_upstream_gradients_at_once(case, batched):
    def rows(f):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        upstream = torch.eye(3) if batched else torch.eye(3)[1]
        return torch.autograd.grad(f(x, w), (x, w), upstream, is_grads_batched=batched)

    close(rows(case.op), rows(case.meant), 1e-4)


@cases
def test_retain_graph(case):
    x = X.clone().requires_grad_()
    y = case.op(x, W)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), x)


@cases
def test_gradients_accumulate(case):
    """`.grad` of a tensor that is used twice adds up the gradients of two backward passes."""

    def total(f):
        x = X.clone().requires_grad_()
        for _ in range(2):
            f(x, f(x, W)).sum().backward()
        return x.grad

    close(total(case.op), total(case.meant), 1e-3)
