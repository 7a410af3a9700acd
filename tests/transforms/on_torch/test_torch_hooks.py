"""Hooks on saved tensors, tensors, nodes and modules, and anomaly mode."""

import re

import pytest
import torch
from cases import CASES, V, X, all_as_meant, as_meant, each_of
from support import close
from torch.autograd import graph
from vectors import Module, leaves, second

from multigrad import op_custom_gradient


@each_of()
def test_every_residual_goes_through_the_hooks(case):
    """Saved tensors are packed, and gradients are computed from the unpacked tensors only."""
    kept = []

    def pack(tensor):
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    x, w = leaves()
    with graph.saved_tensors_hooks(pack, lambda place: kept[place]):
        y = case.op(x, w)
    wanted = torch.autograd.grad(case.meant(x, w), (x, w), V)
    close(torch.autograd.grad(y, (x, w), V, retain_graph=True), wanted, 1e-4)
    for tensor in kept:
        tensor.fill_(float("nan"))
    spoilt = torch.autograd.grad(y, (x, w), V)
    if kept:
        assert any(slope.isnan().any() for slope in spoilt)
    else:
        close(spoilt, wanted)


def packed_in_double(tensor):
    return tensor.detach().double(), tensor.dtype


def unpacked(packed):
    tensor, dtype = packed
    return tensor.to(dtype)


def saved_by(hooks):
    def gradients(f):
        x, w = leaves()
        with hooks():
            return torch.autograd.grad(f(x, w), (x, w), V)

    return gradients


def hooks_on_the_result_and_on_an_input(f):
    """One gets the upstream gradient, the other the gradient of the rule. Each can replace it."""
    seen = []
    x, w = leaves()
    inner = x * 1.0
    inner.register_hook(lambda g: (seen.append(g), g * 2.0)[1])
    inner.retain_grad()
    y = f(inner, w)
    y.register_hook(lambda g: (seen.append(g), g * V)[1])
    y.retain_grad()
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    y.sum().backward()
    return seen, inner.grad, y.grad, x.grad, w.grad


def a_hook_on_several_tensors(f):
    seen = []
    x, w = leaves()
    inner = x * 1.0, w * 1.0
    handle = graph.register_multi_grad_hook(inner, lambda slopes: seen.extend(slopes))
    f(*inner).backward(V)
    handle.remove()
    return [torch.zeros(3) if slope is None else slope for slope in seen]


def hooks_of_a_module(f):
    seen, module, x = [], Module(f), X.clone().requires_grad_()
    module.register_full_backward_pre_hook(lambda module, upstream: (upstream[0] * V,))
    module.register_full_backward_hook(lambda module, of_inputs, upstream: seen.append((of_inputs, upstream)))
    module(x).sum().backward()
    return seen, x.grad, module.weight.grad


test_hooks = all_as_meant(
    {
        "saved on the CPU": saved_by(graph.save_on_cpu),
        "saved in another precision": saved_by(lambda: graph.saved_tensors_hooks(packed_in_double, unpacked)),
        "disabled": saved_by(lambda: graph.disable_saved_tensors_hooks("no hooks here")),
        "on the result and on an input": hooks_on_the_result_and_on_an_input,
        "on several tensors": a_hook_on_several_tensors,
        "of a module": hooks_of_a_module,
    }
)


def test_a_hook_on_the_node():
    x, w = leaves()
    y = CASES["input"].op(x, w)
    seen = []
    y.grad_fn.register_prehook(lambda upstream: (seen.append(upstream), (upstream[0] * 2.0,))[1])
    y.grad_fn.register_hook(lambda gradients, upstream: seen.append(gradients))
    y.backward(V)
    close(seen[0], (V,))
    wanted = torch.autograd.grad(CASES["input"].meant(x, w), (x, w), 2.0 * V)
    close([g for g in seen[1] if g is not None], list(wanted), 1e-4)
    close((x.grad, w.grad), wanted, 1e-4)


# Anomaly mode warns that it is slow.
anomaly = pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")


@anomaly
@as_meant(tolerance=1e-3)
def test_anomaly_mode_does_not_change_gradients(f):
    with torch.autograd.detect_anomaly(check_nan=True):
        return second(f)


@anomaly
def test_anomaly_mode_finds_a_rule_that_returns_nan():
    """The error names the op, and the warning the line of the call."""
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * float("nan")), name="broken")
    x = X.clone().requires_grad_()
    with (
        torch.autograd.detect_anomaly(),
        pytest.warns(UserWarning, match=re.escape("test_torch_hooks.py")),
        pytest.raises(RuntimeError, match="'brokenBackward' returned nan values"),
    ):
        op(x).sum().backward()
