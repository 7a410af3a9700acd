"""The ways of PyTorch to compute a gradient, see `ways.py`."""

import functools
import itertools

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def every(tensors):
    return tuple(range(len(tensors)))


def by_autograd(loss):
    def gradients(*xs):
        own = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
        return torch.autograd.grad(loss(*own), own, create_graph=True)

    return gradients


def by_saved_tensors_hooks(loss):
    gradients = by_autograd(loss)

    def run(*xs):
        with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            return gradients(*xs)

    return run


def by_grad(loss):
    return lambda *xs: torch.func.grad(loss, every(xs))(*xs)


def by_vjp(loss):
    def gradients(*xs):
        value, pull = torch.func.vjp(loss, *xs)
        return pull(torch.ones_like(value))

    return gradients


def by_vmap(loss):
    def gradients(*xs):
        both = torch.func.vmap(by_grad(loss))(*[torch.stack([x, 0.5 * x]) for x in xs])
        return [first for first, _ in both]

    return gradients


RECORDED = {
    "torch.autograd.grad": by_autograd,
    "a checkpoint": lambda loss: by_autograd(functools.partial(checkpoint, loss, use_reentrant=False)),
    "tensors saved elsewhere": by_saved_tensors_hooks,
}
TRANSFORMS = {
    "torch.func.grad": by_grad,
    "torch.func.vjp": by_vjp,
    "torch.func.jacfwd": lambda loss: lambda *xs: torch.func.jacfwd(loss, every(xs))(*xs),
    "torch.func.vmap": by_vmap,
}
WAYS = {**RECORDED, **TRANSFORMS}

# In torch.func, PyTorch records nothing, and supports no hooks for saved tensors, as a checkpoint needs.
LACKING = {
    *itertools.product(TRANSFORMS, RECORDED),
    *itertools.product(["a checkpoint", "tensors saved elsewhere"], TRANSFORMS),
}

EAGER = ["torch.autograd.grad", "torch.func.grad", "torch.func.vjp"]
"""The ways in which a function sees concrete values."""
LACKING_OF_KERAS = {
    *itertools.product(TRANSFORMS, ["keras.remat"]),
    *itertools.product(["keras.remat"], TRANSFORMS),
    ("torch.func.vmap", "keras.ops.cond"),  # a Python branch on a value, which is mapped
}
# In forward mode, a method or an op that reads a weight runs with tangents, which a host call lacks.
LACKING_OF_HOST_CALLS = {"torch.func.jacfwd"}
LACKING_OF_ONE_ARRAY = set()
