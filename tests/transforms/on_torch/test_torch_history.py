"""What PyTorch records: the histories of results, of gradients, and of tensors that only a rule uses."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import keras
import pytest
import torch
from cases import cube_by_intermediate as by_intermediate
from keras import ops
from support import close
from test_first_order import with_rule

from multigrad import grad, jvp, op_custom_gradient, value_and_grad, vjp


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def test_gradients_in_inference_mode():
    """PyTorch records nothing in inference mode."""

    def cube(x):
        return (by_intermediate(x) * x).sum()

    made_outside = torch.tensor([1.0, 2.0])
    with torch.inference_mode():
        for x in (torch.tensor([1.0, 2.0]), made_outside):
            close(grad(lambda x: (x * x).sum())(x), 2 * x)
            close(grad(cube)(x), 22 * x**3)
            close(grad(lambda x: grad(cube)(x).sum())(x), (21 + 42 + 21) * x**2)
            outputs, pull = vjp(by_intermediate, x)
            close((outputs, *pull(torch.ones(2))), (x**3, 21 * x**2))
            close(jvp(by_intermediate, (x,), (x,))[1], 21 * x**3)
            variable = keras.Variable(x)
            value, (gradient,) = value_and_grad(lambda v=variable: cube(v.value), variables=[variable])()
            close((value, gradient), (cube(x), 22 * x**3))


def in_a_cell(y, _):
    return lambda: y


def in_a_list(y, holder):
    holder.kept = [y]
    return lambda: holder.kept[0]


def in_a_gradient(y, holder):
    """Held by PyTorch, but by no Python object."""
    holder.leaf = torch.zeros_like(y, requires_grad=True)
    holder.leaf.grad = y
    return lambda: holder.leaf.grad


def as_a_base(y, holder):
    holder.view = y[:1]
    return lambda: holder.view._base


@pytest.mark.parametrize("hold", [in_a_cell, in_a_list, in_a_gradient, as_a_base])
@pytest.mark.parametrize("within", [False, True])
def test_an_output_with_other_references_is_unchanged(hold, within):
    """The stored output gets no history, and two calls have separate gradients."""
    holder = SimpleNamespace()
    holder.again = None if within else hold(torch.ones(2), holder)

    @op_custom_gradient
    def op(x, factor):
        if within:
            holder.again = hold(torch.exp(x) * 0.0 + 1.0, holder)
        return holder.again(), lambda u: (factor * u, None)

    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    y = op(first, torch.tensor(7.0))
    held = holder.again()
    assert not held.requires_grad
    assert held.grad_fn is None
    z = op(second, torch.tensor(11.0))
    close(torch.autograd.grad(y.sum(), first)[0], torch.full((2,), 7.0))
    close(torch.autograd.grad(z.sum(), second)[0], torch.full((2,), 11.0))


@pytest.mark.parametrize("rule_of", [lambda y: lambda u: u * y, lambda y: lambda u: u], ids=["uses", "alone"])
def test_an_output_has_no_attributes_of_the_returned_tensor(rule_of):
    """A layer may set a mask as an attribute of its output, but the op returns another tensor."""

    @op_custom_gradient
    def op(x):
        y = torch.exp(x)
        y._keras_mask = x > 0.5
        return y, rule_of(y)

    assert not hasattr(op(leaf(0.5, 1.0)), "_keras_mask")


@pytest.mark.parametrize("output", [lambda x, w: x * w, lambda x, w: w])
def test_a_closed_over_leaf(output):
    x, w = leaf(1.0), leaf(3.0)
    loss = op_custom_gradient(lambda x: (output(x, w), lambda u: u * 7.0))(x).sum()
    close(torch.autograd.grad(loss, x, retain_graph=True)[0], torch.tensor([7.0]))
    with pytest.raises(RuntimeError, match=r"differentiated tensor that is not an argument(.|\n)*got: 'w'"):
        loss.backward()
    assert (w.grad, w.is_leaf) == (None, True)


def test_a_gradient_of_variables_has_no_history():
    weight = keras.Variable(0.0)

    @op_custom_gradient
    def op(x):
        e = torch.exp(x * weight.value)
        return e + 1.0, lambda u, variables: (u * e * 3.0, [u * e * 7.0])

    value, (gradient,) = value_and_grad(op, variables=[weight])(1.0)
    assert float(value) == 2.0  # which warns if a gradient is required
    with pytest.raises(RuntimeError, match="it was not recorded"):
        (weight.value + gradient).backward()
    pulled = vjp(lambda: op(1.0), variables=[weight])[1](1.0)[0]
    with pytest.raises(RuntimeError, match="it was not recorded"):
        (weight.value + pulled).backward()
    with torch.no_grad():
        value, (gradient,) = value_and_grad(op, variables=[weight])(1.0)
    assert not value.requires_grad
    assert not gradient.requires_grad


class Slope:
    def __init__(self, slope):
        self.held = {"slope": slope}

    @op_custom_gradient
    def of(self, x):
        return torch.sign(x), lambda u: 7.0 * u * self.held["slope"] * torch.abs(x)


def gradient_of(*terms):
    return grad(lambda x: sum(term(x) for term in terms).sum())(torch.tensor([0.5]))


def test_a_gradient_depends_on_tensors_that_only_the_rule_uses():
    """A later backward pass may need them. If no tensor does, the gradient has no history."""
    weight, tensor, other = keras.Variable(3.0), leaf(3.0), leaf(1.0)
    of_weight = op_custom_gradient(lambda x: (torch.sign(x), lambda u: 7.0 * u * weight * torch.abs(x)))
    for op, held in ((of_weight, weight.value), (Slope(tensor).of, tensor)):
        (gradient_of(op).sum() + other.sum()).backward()
        close(held.grad.reshape(()), torch.tensor(3.5))
    without, depends = Slope(3.0).of, Slope(tensor).of
    assert not gradient_of(without).requires_grad
    for terms in ([depends, *[without] * 5], [*[without] * 5, depends], [*[without] * 5, depends, without]):
        assert gradient_of(*terms).requires_grad


@pytest.mark.parametrize("layer", [keras.layers.Dense(1), torch.nn.Linear(1, 1)], ids=["Keras", "PyTorch"])
def test_a_gradient_depends_on_the_weights_of_a_held_layer(layer):
    layer(torch.ones(1, 1))
    held = Slope([layer])

    @op_custom_gradient
    def op(x):
        return torch.sign(x), lambda u: u * ops.sum(held.held["slope"][0].bias) + 7.0 * u * x

    assert gradient_of(op).requires_grad


def test_an_unrecorded_view_of_a_weight_is_not_a_dependence():
    with torch.no_grad():
        view = leaf(1.0, 2.0).view(2)
    assert view.requires_grad  # PyTorch reports it, although the view has no node
    held = Slope(3.0)
    held.view = view
    close(grad(lambda x: held.of(x).sum())(torch.ones(2)), torch.full((2,), 21.0))


def test_a_tangent_has_the_history_of_the_arguments():
    """Tensors that are differentiated inside have no history outside, as in torch.func."""
    for primal, direction in ((leaf(1.0), torch.ones(1)), (torch.ones(1), leaf(1.0))):
        for op in (by_intermediate, torch.exp):
            assert jvp(op, (primal,), (direction,))[1].requires_grad
            assert not jvp(op, (primal.detach(),), (direction.detach(),))[1].requires_grad
    by_primal = jvp(by_intermediate, (x := leaf(2.0),), (torch.ones(1),))[1]
    close(torch.autograd.grad(by_primal.sum(), x)[0], torch.tensor([7.0 * 3.0 * 2.0 * 2.0]))
    _, pull = vjp(by_intermediate, torch.tensor([2.0]))
    assert not pull(torch.ones(1))[0].requires_grad
    assert pull(leaf(1.0))[0].requires_grad


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_an_inner_derivative_in_another_thread():
    """The thread does not know that another derivative is being computed."""
    x, one = torch.tensor([2.0]), torch.ones(1)
    slope = grad(lambda y: (y**3).sum())
    inner = {
        "grad": lambda z: in_a_thread(slope, z),
        "closed over": lambda z: in_a_thread(grad(lambda y: (y**2 * z * 3.0).sum()), x),
        "jvp": lambda z: in_a_thread(lambda y: jvp(lambda w: w**3, (y,), (one,))[1], z),
        "vjp": lambda z: in_a_thread(lambda y: vjp(lambda w: w**3, y)[1](one)[0], z),
    }
    for function in inner.values():
        close(grad(lambda z, f=function: f(z).sum())(x), torch.tensor([12.0]))
        close(jvp(function, (x,), (one,))[1], torch.tensor([12.0]))


def test_gradcheck_and_gradgradcheck():
    op = op_custom_gradient(lambda x, y: (x**2 * y, lambda u: (u * 2 * x * y, u * x**2)))
    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


# ------------------------------------------------------------------------------- `higher_order=False`


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
