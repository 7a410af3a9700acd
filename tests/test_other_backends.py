"""A backend of Keras that multigrad does not know, and the page about adding one.

Keras (3.15) loads only the backends that it lists. The stand-in is Keras's NumPy backend under another name.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_architecture import DEFAULTS, members

from multigrad.backend import defaults
from multigrad.backend.base import Backend
from multigrad.common.frameworks import is_installed

STAND_IN = """
import importlib.machinery, sys

# The modules of Keras (3.15) that choose classes by the name of the backend.
MODULES = ("backend", "layers.layer", "models.model", "export.saved_model", "utils.backend_utils")


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        path = self.get_filename(name)
        return self.source_to_code(self.get_data(path).replace(b'== "numpy"', b'== "mlx"'), path)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.removeprefix("keras.src.") not in MODULES:
            return None
        spec = super().find_spec(name, path, target)
        spec.loader = Loader(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
"""

PROGRAM = """
import keras, numpy as np
from keras import ops
import multigrad
from multigrad.layers import GradientReversal

assert keras.backend.backend() == "mlx"


@multigrad.op_custom_gradient(name="tests>twice")
def twice(x):
    return 2.0 * x, lambda upstream: 7.0 * upstream


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=shape[-1:], initializer="ones")

    @multigrad.op_custom_gradient
    def call(self, x):
        return x * self.w, lambda upstream, variables: (upstream, [upstream])


x = np.ones((2, 3), "float32")
model = keras.Sequential([keras.Input((3,)), Scaled(), GradientReversal(), keras.layers.Lambda(twice)])
assert np.array_equal(model.predict(x, verbose=0), 2.0 * x)
assert np.array_equal(multigrad.ops.log1pexp(0.0 * x), np.log1p(np.exp(0.0 * x)))
assert np.array_equal(multigrad.jit(twice)(x), 2.0 * x)
assert np.array_equal(multigrad.vmap(twice)(x), 2.0 * x)
for transform in (multigrad.grad, multigrad.value_and_grad, multigrad.jacobian, multigrad.hessian):
    try:
        transform(lambda x: ops.sum(twice(x)))(x)
    except NotImplementedError as error:
        assert "Keras's mlx backend computes no gradients" in str(error), error
        assert "tensorflow, jax, torch" in str(error), error
    else:
        raise AssertionError
print("done")
"""


@pytest.mark.package
@pytest.mark.skipif(not is_installed("numpy"), reason="Keras's NumPy backend imports JAX")
def test_a_backend_that_is_not_known_runs_forward():
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:multigrad", "-c", STAND_IN + PROGRAM],
        env={**os.environ, "KERAS_BACKEND": "mlx"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stdout + done.stderr


PAGE = Path(__file__).parent.parent / "docs" / "add-a-backend.md"


@pytest.mark.package
def test_the_page_lists_the_functions_of_a_backend():
    """The first table has what a backend must define, and the second one what it may define."""
    text = PAGE.read_text(encoding="utf-8")
    tables = [re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in text.split("## ")]
    required, optional = [names for names in tables if names]
    assert sorted(required) == sorted([*Backend.__annotations__, *members(Backend)])
    assert sorted(optional) == sorted(DEFAULTS)


@pytest.mark.package
def test_the_page_names_tests_that_exist():
    root = PAGE.parent.parent
    for path in re.findall(r"`(tests/[\w/.]+)`", PAGE.read_text(encoding="utf-8")):
        assert (root / path).exists(), path


@pytest.mark.package
def test_each_function_of_a_backend_is_documented():
    functions = [getattr(Backend, name) for name in members(Backend)]
    functions += [f for f in vars(defaults).values() if inspect.isfunction(f)]
    assert all(map(inspect.getdoc, functions))
