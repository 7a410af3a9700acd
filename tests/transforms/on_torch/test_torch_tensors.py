"""Devices, sparse tensors, and tensors without values."""

import keras
import numpy as np
import pytest
import torch
from keras import ops
from support import array, close

from multigrad import grad, op_custom_gradient


def test_a_rule_makes_tensors_on_the_device_of_its_function():
    """The function runs in a `keras.device` context, which ends before the rule runs."""
    seen = []

    def rule(upstream):
        seen.append(ops.ones(()).device.type)
        return upstream * 7.0

    x = torch.tensor(1.0, requires_grad=True)
    with keras.device("meta"):
        y = op_custom_gradient(lambda x: (x * 2.0, rule))(x)
    y.backward()
    assert (seen, x.grad) == (["meta"], 7.0)
    assert ops.ones(()).device.type == "cpu"


def test_a_gradient_is_moved_to_the_device_of_its_argument():
    """The device `meta` stands for a GPU. PyTorch raises an error for a gradient on another device."""
    elsewhere, here = torch.ones(3, device="meta", requires_grad=True), torch.ones(3, requires_grad=True)
    op = op_custom_gradient(lambda x, y: (x * 2.0, lambda u: (torch.ones(3), torch.ones(2, 3) * 7.0)))
    op(elsewhere, here).sum().backward()
    assert elsewhere.grad.device == elsewhere.device
    close(here.grad, array(14.0, 14.0, 14.0))


ROWS = torch.tensor([1, 2, 2])


LOOKUPS = {
    "embedding": lambda w: torch.nn.functional.embedding(ROWS, w, sparse=True),
    "gather": lambda w: torch.gather(w, 0, ROWS[:, None].expand(3, 2), sparse_grad=True),
    "embedding_bag": lambda w: torch.nn.functional.embedding_bag(ROWS[None], w, sparse=True, mode="sum"),
}


def whole_and_twice(x):
    def rule(u):
        return ops.where(x < 9.0, 7.0 * u["a"] + u["b"], 0.0)

    return {"a": x * 1.0, "b": x * 2.0, "c": ops.shape(x)}, rule


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_sparse_upstream_gradients_are_converted(lookup):
    seen = []

    @op_custom_gradient
    def masked(x):
        def rule(u):
            seen.append(u.layout)
            return ops.where(x < 9.0, 7.0 * u, 0.0)  # PyTorch has no `where` for sparse tensors

        return x * 1.0, rule

    wanted = np.float32([[0, 0], [7, 7], [14, 14], [0, 0]])
    several = op_custom_gradient(whole_and_twice)
    for op in (masked, lambda x: several(x)["a"]):

        def loss(w, op=op):
            return LOOKUPS[lookup](op(w)).sum()

        w = torch.ones(4, 2)
        parameter = w.clone().requires_grad_()
        loss(parameter).backward()
        close(parameter.grad, torch.tensor(wanted))
        close(grad(loss)(w), torch.tensor(wanted))
        close(torch.func.grad(loss)(w), torch.tensor(wanted))
    assert set(seen) == {torch.strided}


def test_a_second_derivative_with_a_sparse_upstream_gradient():
    square = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))

    def slope(w, sparse):
        y = torch.nn.functional.embedding(ROWS, square(w), sparse=sparse)
        return torch.autograd.grad((y**2).sum(), w, create_graph=True)[0]

    w = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    close(*[torch.autograd.grad((slope(w, sparse) ** 2).sum(), w) for sparse in (True, False)])
