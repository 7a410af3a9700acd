"""The examples in docstrings run, each separately, and print the documented output."""

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import ops
from support import BACKEND, check_comments

import multigrad
from multigrad.common.frameworks import DIFFERENTIATING as DIFFERENTIATING_BACKENDS

pytestmark = pytest.mark.package


def modules(package=multigrad):
    """Yield each module of multigrad for the active backend."""
    yield package
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        name = info.name.rpartition(".")[2]
        is_of_a_backend = package.__name__ == "multigrad.backend" or name in DIFFERENTIATING_BACKENDS
        if name == "__main__" or (is_of_a_backend and name != BACKEND):
            continue
        if name == "reverse" and info.name not in sys.modules:  # needs JAX 0.10, where the backend imports it
            continue
        module = importlib.import_module(info.name)
        yield from modules(module) if info.ispkg else [module]


def documented(owner, module):
    """Yield an object, and the functions and classes that it defines."""
    yield owner
    for value in vars(owner).values():
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
        if (inspect.isfunction(function) or inspect.isclass(function)) and function.__module__ == module:
            yield from documented(function, module)


DIFFERENTIATING = re.compile(r"(grad|gradients|jacobian|hessian|vjp|jvp|CheckedFunction|fit)\(")


def examples():
    for module in modules():
        for owner in documented(module, module.__name__):
            blocks = re.findall(
                r"^```python\n(.*?)^```", inspect.getdoc(owner) or "", re.DOTALL | re.MULTILINE
            )
            name = getattr(owner, "__qualname__", "module")
            for block in blocks:
                marks = () if DIFFERENTIATING.search(block) else pytest.mark.forward
                yield pytest.param(module, block, id=f"{module.__name__}:{name}", marks=marks)


EXAMPLES = list(examples())


def check_output(example, output):
    """Compare the output with the comments of an example: lines, or the text after a `print`."""
    lines = re.findall(r"^# (.*)$", example, re.MULTILINE)
    assert not lines or output.splitlines() == lines
    check_comments(example, output)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config")  # by a trace around `fit` on TensorFlow
@pytest.mark.parametrize(("module", "example"), EXAMPLES)
def test_an_example(module, example, capsys, monkeypatch):
    """An example with imports is self-contained. Others have the names of their module, Keras, and a few
    tensors.
    """
    x, y, u, v = (ops.array([1.0, number]) for number in (2.0, 3.0, 4.0, 5.0))
    names = {"keras": keras, "ops": ops, "multigrad": multigrad, "np": np, "Tensor": type(x)}
    seen = vars(module) | names | {"x": x, "y": y, "u": u, "v": v}
    if re.search(r"^(import|from) ", example, re.MULTILINE):
        seen = {}
    if "keras.layers" in example:
        keras.utils.clear_session()  # Keras numbers the names of layers
    own = types.ModuleType("example")  # a module in which torch.compile finds names of the example
    monkeypatch.setitem(sys.modules, "example", own)
    vars(own).update(seen | {"__name__": "example"})
    exec(example, vars(own))
    check_output(example, capsys.readouterr().out)


@pytest.mark.forward
def test_each_example_in_the_source_runs():
    assert len(EXAMPLES) > 50
    for module in modules():
        written = inspect.getsource(module).count("```python\n")
        run = [example for example in EXAMPLES if example.values[0] is module]
        assert len(run) == written, module.__name__


@pytest.mark.forward
def test_the_signature_of_an_op_is_that_of_its_output():
    @multigrad.op_custom_gradient
    def f(x: float, *, scale: int = 2) -> tuple[str, Callable[..., float]]:
        return x * scale, lambda upstream: upstream * scale

    assert str(inspect.signature(f)) == "(x: float, *, scale: int = 2) -> str"
    assert f.__annotations__ == {"x": float, "scale": int, "return": str}


@pytest.mark.forward
@pytest.mark.parametrize("name", [name for name in multigrad.ops.__all__ if not hasattr(ops, name)])
def test_an_op_has_real_types(name):
    signature = inspect.signature(getattr(multigrad.ops, name))
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    assert inspect.Signature.empty not in (*annotations, signature.return_annotation)
    assert "tuple" not in str(signature.return_annotation)
