"""`higher_order=False` on PyTorch: the saved tensors, and the errors."""

import pytest
import torch
from test_first_order import with_rule

from multigrad import op_custom_gradient


@pytest.mark.parametrize("by", ["upstream", "closed over"])
def test_other_tensors_that_the_gradient_depends_on(by):
    x, w, u = (torch.ones(3, requires_grad=True) for _ in range(3))

    @op_custom_gradient(higher_order=False)
    def op(x):
        e = torch.exp(x)
        return e + 1.0, lambda upstream: upstream * e * w

    (gradient,) = torch.autograd.grad(op(x), x, u, create_graph=True)
    with pytest.raises(RuntimeError, match="higher_order=True"):
        torch.autograd.grad(gradient.sum(), u if by == "upstream" else w)


@pytest.mark.parametrize(("options", "count"), [({}, 2), ({"higher_order": False}, 1)])
def test_inputs_are_not_saved(options, count):
    saved = []
    op = op_custom_gradient(with_rule, **options)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: saved[0]):
        op(torch.ones(3, requires_grad=True))
    assert len(saved) == count
