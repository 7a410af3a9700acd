"""torch.export: the forward pass of every op, also loaded from a file. A gradient through an op raises."""

import io
import json
import subprocess
import sys

import keras
import pytest
import torch
from cases import CASES, V, W, X, all_as_meant, each_of
from keras import ops
from support import close
from vectors import Module

from multigrad import grad, op_custom_gradient, value_and_grad
from multigrad.keras_graph.saving import Unsaved, decode, encode

# A strict export raises a KeyError for a weight that no module holds, with and without an op (PyTorch 2.13).
EACH = each_of(forms=["method"])

pytestmark = pytest.mark.filterwarnings(
    # A strict export: of the scope in which Keras's variables are read.
    "ignore:While compiling, we found certain side effects:UserWarning",
    "ignore:`torch.jit.trace.*` is deprecated",
    # PyTorch (2.12, 2.13), of its own code, when it decomposes, saves or loads a program.
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",
    "ignore:No complete tensor found in the group:UserWarning",
    "ignore:The given buffer is not writable:UserWarning",
)


def between(f):
    return Module(lambda x, w: torch.sin(f(x, w)))


def loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def with_dynamic_rows(f):
    rows = torch.stack([X, V])
    program = torch.export.export(between(f), (rows,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    return program.module()(torch.stack([X, V, W, X + V, W]))


test_programs = all_as_meant(
    {
        "strict": lambda f: torch.export.export(between(f), (X,), strict=True).module()(V),
        "not strict": lambda f: torch.export.export(between(f), (X,)).module()(V),
        "from a file": lambda f: loaded(torch.export.export(between(f), (X,))).module()(V),
        "a dynamic number of rows": with_dynamic_rows,
    },
    each=EACH,
)


class Layers(torch.nn.Module):
    """An op on the first output of a layer, and a layer after it."""

    def __init__(self, op):
        super().__init__()
        self.before, self.op, self.after = torch.nn.Linear(3, 3), op, torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.after(self.op(self.before(x), W))


# A decomposition replaces `detach` by an identity, which has a gradient.
EXPORTS = {
    "strict": lambda module: torch.export.export(module, (X,), strict=True).module(),
    "not strict": lambda module: torch.export.export(module, (X,)).module(),
    "decomposed": lambda module: torch.export.export(module, (X,)).run_decompositions().module(),
    "loaded": lambda module: loaded(torch.export.export(module, (X,)).run_decompositions()).module(),
    "trace": lambda module: torch.jit.trace(module, (X,)),
}
NO_DERIVATIVE = "derivative for aten::copy is not implemented"


def trained(program):
    """Return the names of the parameters that get a gradient."""
    return [name for name, parameter in program.named_parameters() if parameter.grad is not None]


OPS = {name: case.op for name, case in CASES.items()}
OPS["an input"] = op_custom_gradient(lambda x, w: (x, lambda u: (-u, None)))
# Its operations have no derivative, but the op has one.
OPS["a step"] = op_custom_gradient(lambda x, w: ((x > w).to(x.dtype), lambda u: (u * 7.0, None)))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("recorded", [True, False])
def test_an_exported_op_has_no_gradient(name, how, recorded):
    """A gradient through it raises, instead of being the gradient of the function's operations, or zero."""
    module = Layers(OPS[name])
    with torch.set_grad_enabled(recorded):
        program = EXPORTS[how](module)
    y = program(X)
    close(y.detach(), module(X).detach())
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        y.sum().backward()
    assert not [parameter for parameter in trained(program) if "before" in parameter]


def slope(f, x, create_graph=False):
    x = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=create_graph)
    return torch.autograd.grad((first * x).sum(), x)[0] if create_graph else first


SLOPES = {
    "autograd": slope,
    "second": lambda f, x: slope(f, x, create_graph=True),
    "multigrad.grad": lambda f, x: grad(lambda x: f(x).sum())(x),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch.autograd itself
@pytest.mark.parametrize("how", ["export", "trace"])
@pytest.mark.parametrize("by", SLOPES)
@pytest.mark.parametrize("name", ["intermediate", "output"])
def test_a_gradient_in_an_exported_program_uses_the_rule(name, how, by):
    class Slope(torch.nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                return SLOPES[by](lambda x: CASES[name].op(x, W) + x, x)

    if how == "export":
        program = torch.export.export(Slope(), (X,)).module()
    else:  # the check of a trace runs it without gradients, which gives another graph
        program = torch.jit.trace(Slope(), (X,), check_trace=False)
    close(program(X), SLOPES[by](lambda x: CASES[name].meant(x, W) + x, X), 1e-4)


def test_symbolic_tracing_by_fx_raises():
    with pytest.raises(TypeError, match=r"output: torch\.fx records the program"):
        torch.fx.symbolic_trace(Layers(op_custom_gradient(lambda x, w: (x, lambda u: u), name="output")))


@pytest.mark.parametrize("how", EXPORTS)
def test_layers_after_an_exported_op_train_if_those_before_it_are_frozen(how):
    module = Layers(CASES["intermediate"].op)
    program = EXPORTS[how](module)
    for name, parameter in program.named_parameters():
        parameter.requires_grad_("after" in name)
    program(X).sum().backward()
    assert sorted(trained(program)) == ["after.bias", "after.weight"]
    parameters = dict(program.named_parameters())
    close(parameters["after.weight"].grad, module.op(module.before(X), W).detach().expand(2, 3))


@pytest.mark.parametrize("how", ["strict", "not strict", "decomposed", "trace"])
def test_the_outputs_of_an_exported_op_keep_their_types(how):
    @op_custom_gradient
    def several(x):
        outputs = x, x.double(), x.bfloat16(), x + 1j, x.argmax(), x > 0, x.expand(2, 3).T, x[:0], x.sum()
        return outputs, lambda *upstream: upstream[0]

    class Several(torch.nn.Module):
        def forward(self, x):
            return several(x)

    for got, wanted in zip(EXPORTS[how](Several())(X), several(X), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)


def test_an_exported_program_without_recording():
    program = EXPORTS["not strict"](Layers(CASES["intermediate"].op))
    with torch.no_grad():
        assert not program(X.clone().requires_grad_()).requires_grad


LOADER = """
import sys, torch

path = sys.argv[1]
program = torch.jit.load(path) if path.endswith(".pt") else torch.export.load(path).module()
y = program(torch.tensor([0.5, -1.25, 1.5]))
print(y.tolist())
assert "multigrad" not in sys.modules
try:
    y.sum().backward()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["model.pt2", "model.pt"])
def test_a_program_in_a_process_without_multigrad(tmp_path, name):
    module = Layers(CASES["intermediate"].op)
    if name == "model.pt":
        torch.jit.trace(module, (X,)).save(tmp_path / name)
    else:
        torch.export.save(torch.export.export(module, (X,)), tmp_path / name)
    command = [sys.executable, "-c", LOADER, str(tmp_path / name)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    values, error = done.stdout.splitlines()
    close(torch.tensor(json.loads(values)), module(X).detach())
    assert error == NO_DERIVATIVE


def test_a_torch_parameter_is_not_saved():
    """The parameter would be restored as a tensor, which is not trainable."""
    with pytest.raises(Unsaved):
        encode(torch.nn.Parameter(torch.ones(2)))
    assert type(decode(encode(ops.ones(2)))) is type(ops.ones(2))


def test_a_gradient_with_respect_to_a_weight_is_exported():
    weight = keras.Variable([1.0, 2.0, 3.0])

    class Slope(torch.nn.Module):
        def forward(self, x):
            value, (slope,) = value_and_grad(lambda: (weight * weight * x).sum(), variables=[weight])()
            return value, slope

    exported = torch.export.export(Slope(), (torch.ones(3),), strict=False).module()
    close(exported(torch.tensor([1.0, 0.0, 2.0])), (19.0, torch.tensor([2.0, 0.0, 12.0])))
