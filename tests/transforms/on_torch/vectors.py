"""Derivatives of a function of two vectors by `torch.autograd`."""

import torch
from cases import V, W, X


def leaves():
    return X.clone().requires_grad_(), W.clone().requires_grad_()


class Module(torch.nn.Module):
    """A function of a vector and of a parameter."""

    def __init__(self, f):
        super().__init__()
        self.f, self.weight = f, torch.nn.Parameter(W.clone())

    def forward(self, x):
        return self.f(x, self.weight)


def gradients(f, x=X, w=W):
    """Return the value and the gradients."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = f(x, w)
    y.backward(torch.ones_like(y) * V)
    return y.detach(), x.grad, w.grad


def first(f):
    return gradients(f)[1:]


def second(f):
    x, w = leaves()
    slopes = torch.autograd.grad(f(torch.sin(x), w**2), (x, w), V, create_graph=True)
    return torch.autograd.grad(sum([(slope**2).sum() for slope in slopes]), (x, w))
