"""In-place modification of a result, of an argument, and of residuals: right, or an error."""

import pytest
import torch
from cases import V, W, X, each_of
from forms import FORMS, Written, in_form
from support import close
from vectors import leaves

from multigrad import grad, op_custom_gradient, vjp


def multiplied(y):
    return y.mul_(2.0)


def with_an_element_set(y):
    y[1] = 5.0
    return y


def in_part(y):
    y[:2].add_(1.0).mul_(V[:2])
    return y


def added_to(y):
    return torch.zeros(3).add_(y)


CHANGES = {f.__name__: f for f in (multiplied, with_an_element_set, in_part, added_to)}


@each_of()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("order", [1, 2])
def test_modifying_a_result(case, change, order):
    def gradients(f):
        x, w = leaves()
        y = change(f(torch.sin(x), w**2))
        slopes = torch.autograd.grad(y, (x, w), V, create_graph=order == 2)
        if order == 1:
            return slopes
        return torch.autograd.grad(sum([(slope**2).sum() for slope in slopes]), (x, w))

    if case.name == "output" and change is not added_to:  # its rule uses the result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(case.op)
    else:
        close(gradients(case.op), gradients(case.meant), 1e-3)


@each_of()
def test_modifying_an_argument(case):
    """Modifying it before the backward pass raises, if the rule uses it."""
    x, w = leaves()
    inner = x * 1.0
    y = case.op(inner, w)
    inner.mul_(3.0)
    if case.name == "nothing":
        close(torch.autograd.grad(y, (x, w), V), (-1.1 * V, 0.5 * V))
    else:
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            torch.autograd.grad(y, (x, w), V)


OF_INPUTS = {
    "an input": op_custom_gradient(lambda x: (x, lambda u: u * 7.0)),
    "one of ten inputs": op_custom_gradient(lambda *xs: (xs[3], lambda u: tuple([u * 7.0 for _ in xs]))),
    "a view of an input": op_custom_gradient(
        lambda x: (x[:1], lambda u: torch.cat([u * 7.0, u * 0.0, u * 0.0]))
    ),
}


@pytest.mark.parametrize("name", OF_INPUTS)
def test_modifying_a_result_that_shares_memory_with_an_input_raises(name):
    inputs = [leaves()[0] for _ in range(10 if name == "one of ten inputs" else 1)]
    y = OF_INPUTS[name](*[x * 1.0 for x in inputs])
    (got,) = torch.autograd.grad(y.sum(), inputs[3 % len(inputs)], retain_graph=True)
    close(got, torch.tensor([7.0, 0.0, 0.0] if "view" in name else [7.0] * 3))
    with pytest.raises(RuntimeError, match=r"in-?place"):
        y.mul_(2.0)


def test_modifying_one_of_two_results():
    @op_custom_gradient
    def op(x):
        return (x**2, x**3), lambda u, v: u * 5.0 * x + v * 7.0 * x**2

    x = X.clone().requires_grad_()
    a, b = op(x)
    a.mul_(2.0)
    (a + b).sum().backward()
    close(x.grad, 10.0 * X + 7.0 * X**2)


def test_a_function_that_modifies_its_own_tensors():
    @op_custom_gradient
    def op(x):
        e = x**2
        y = torch.zeros(3)
        y[:2] = e[:2]
        y.add_(e)
        return y, lambda u: u * 7.0 * e

    x = X.clone().requires_grad_()
    slopes = torch.autograd.grad(op(x), x, V, create_graph=True)
    (second,) = torch.autograd.grad(slopes[0].sum(), x)
    close((*slopes, second), (7.0 * V * X**2, 14.0 * V * X))


@pytest.mark.parametrize("change", [lambda z: z.mul_(2.0), torch.nn.ReLU(inplace=True)])
def test_a_function_that_changes_its_argument_raises(change):
    """The gradient would be with respect to the new value. The caller's tensor stays as it is."""
    x = X.clone().requires_grad_()
    y = x * 1.0
    with pytest.raises(RuntimeError, match="the function changed an argument in place"):
        grad(lambda z: (change(z) ** 3).sum())(y)
    with pytest.raises(RuntimeError, match="the function changed an argument in place"):
        vjp(lambda z: change(z) ** 3, y)
    close(y, X)
    close(grad(lambda z: (change(z * 1.0) ** 3).sum())(y), grad(lambda z: (change(z.clone()) ** 3).sum())(X))


def in_place(x, w, scale):
    def rule(u):
        u[:1].mul_(3.0)
        return u, None

    return scale(x * 2.0), rule, lambda u: u


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_rule_that_changes_its_upstream_gradient(form, order):
    """The other term of the sum gets the same upstream gradient."""
    op, (x, _) = in_form(form, Written("in place", in_place, None)).op, leaves()
    with pytest.raises(RuntimeError, match=r"the rule changed its upstream gradient(.|\n)*upstream \* 2\.0"):
        torch.autograd.grad(((op(x, W) + x) * V).sum() ** 2, x, create_graph=order == 2)
    with pytest.raises(RuntimeError, match="the rule changed its upstream gradient"):
        torch.func.grad(lambda x: ((op(x, W) + x) * V).sum() ** 2)(x)
