"""A second run of the function, which gives its results a history for a second derivative."""

import pytest
import torch
from keras import ops
from support import close

from multigrad import grad, op_custom_gradient


class Drawing:
    """An object whose rule, but not its function, draws random numbers."""

    factor = 7.0

    def __call__(self, x):
        @op_custom_gradient
        def op(x):
            e = x**2
            return e * x, lambda u: self.factor * u * 3 * e + torch.randn_like(u)

        return op(x)


def test_a_rule_that_draws_is_recorded():
    x = torch.tensor(2.0, requires_grad=True)
    torch.manual_seed(0)
    (wanted,) = torch.autograd.grad(Drawing()(x), x)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    (got,) = torch.autograd.grad(Drawing()(x), x, create_graph=True)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.autograd.grad(got, x)[0].item() == 84.0


def test_a_residual_of_another_shape_in_a_second_run_raises():
    lengths = iter([2, 1])

    @op_custom_gradient
    def op(x):
        repeated = x * torch.ones(next(lengths))
        return x * 3.0, lambda u: u * repeated.sum()

    x = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="op: the function returned different values"):
        torch.autograd.grad(op(x), x, create_graph=True)


def test_random_numbers_in_the_slope_raise():
    @op_custom_gradient
    def op(x):
        slope = x * x * torch.rand(1000) * 1e-2
        return slope * 1.0, lambda u: u * slope

    x = torch.ones(1000, requires_grad=True)
    with pytest.raises(RuntimeError, match="op: the function returned different values"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)


def test_a_second_run_does_not_advance_the_random_state():
    drawn = []

    @op_custom_gradient
    def op(x):
        drawn.append(torch.rand(1))
        e = x**2
        return e * 1.0, lambda u: 3.0 * u * e

    x = torch.tensor(2.0, requires_grad=True)
    y = op(x)
    state = torch.get_rng_state()
    torch.autograd.grad(y, x, create_graph=True)
    assert len(drawn) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_the_state_of_the_first_run_applies():
    temperature = 1.0

    @op_custom_gradient
    def op(x):
        t, e = temperature, torch.exp(x)
        return e * 1.0, lambda u: u * e * t

    x = torch.tensor(0.0, requires_grad=True)
    y = op(x)
    temperature = 5.0
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert first.item() == 1.0


def test_a_second_derivative_through_top_k():
    @op_custom_gradient
    def op(x):
        found = ops.top_k(x * x, 2)
        return found[0].sum(), lambda u: u * found[0].sum() * torch.ones(3)

    x = torch.tensor([3.0, 1.0, 2.0])
    close(grad(lambda x: grad(op)(x).sum())(x), torch.tensor([18.0, 0.0, 12.0]))
