"""torch.export: the forward pass of every op, also loaded from a file."""

import io

import pytest
import torch
from cases import each_of
from support import close

X, W, V = torch.tensor([[0.5, -1.25, 1.5], [0.75, 1.0, -0.5], [1.0, -2.0, 0.5]])

# What PyTorch compiles does not read the weight of a reader yet.
cases = each_of(forms=["method"])


class Module(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
        self.weight = torch.nn.Parameter(W.clone())

    def forward(self, x):
        return torch.sin(self.f(x, self.weight))


# A strict export warns of side effects: here the scope in which Keras's variables are read.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@cases
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program(case, strict):
    program = torch.export.export(Module(case.op), (X,), strict=strict)
    close(program.module()(V), Module(case.meant)(V))


@cases
def test_an_exported_program_from_a_file(case):
    file = io.BytesIO()
    torch.export.save(torch.export.export(Module(case.op), (X,)), file)
    file.seek(0)
    close(torch.export.load(file).module()(V), Module(case.meant)(V))


@cases
def test_a_program_with_a_dynamic_number_of_rows(case):
    module = Module(case.op)
    rows = torch.stack([X, V])
    program = torch.export.export(module, (rows,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    more = torch.stack([X, V, W, X + V, W])
    close(program.module()(more), Module(case.meant)(more))


@cases
def test_an_exported_op_has_no_gradient(case):
    """Its gradient is missing, instead of the gradient of its operations. Other operations have gradients."""

    class Beside(torch.nn.Module):
        def forward(self, x):
            return case.op(x, W) * x

    x = X.clone().requires_grad_()
    y = torch.export.export(Beside(), (X,)).module()(x)
    y.backward(V)
    close(x.grad, V * case.meant(X, W))
