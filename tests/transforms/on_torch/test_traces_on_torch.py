"""Traces of gradients in transforms of PyTorch, in compiled code, and in bfloat16."""

import numpy as np
import pytest
import torch

from multigrad import op_custom_gradient, trace_gradients

op = op_custom_gradient(lambda x: (x**2, lambda u: u * 7.0 * x), name="op")


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_trace_under_a_transform(transform):
    with trace_gradients() as trace:
        assert transform(op)(torch.tensor(3.0)).item() == 21.0
    assert trace.calls[0].inputs["x"].tolist() == 3.0
    assert np.ravel(trace.steps[0].downstream["x"]).tolist() == [21.0]


def test_a_trace_of_a_batch_under_vmap():
    with trace_gradients() as trace:
        torch.func.vmap(torch.func.grad(op))(torch.arange(3.0))
    assert trace.calls[0].inputs["x"].tolist() == [0.0, 1.0, 2.0]
    assert [step.downstream["x"].tolist() for step in trace.steps] == [[0.0, 7.0, 14.0]]


def test_a_trace_of_a_compiled_function():
    f = torch.compile(lambda x: op(x).sum(), backend="eager", fullgraph=True)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for times in (1, 2):
        with trace_gradients() as trace:
            f(x).backward()
        assert [step.downstream["x"].tolist() for step in trace.steps] == [[7.0, 14.0]]
        f(x).backward()
        assert x.grad.tolist() == [times * 14.0, times * 28.0]


def test_a_trace_in_bfloat16():
    op = op_custom_gradient(lambda x: (x * 1.0, lambda u: u * 7.0), name="op")
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with trace_gradients() as trace:
        op(x).sum().backward()
    assert trace.to_dict()["steps"][0]["downstream"]["x"]["mean"] == 7.0
    assert trace.to_dict()["steps"][0]["downstream"]["x"]["dtype"] == "bfloat16"
