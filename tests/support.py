"""Helpers for the tests that are the same on every backend."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import multigrad
from multigrad.common.frameworks import is_at_least

BACKEND = keras.backend.backend()
DIFFERENTIATES = BACKEND in ("tensorflow", "jax", "torch")


def is_keras_at_least(version: str) -> bool:
    return is_at_least(keras.__version__, version)


# The modes of `fit`. On PyTorch, `jit_compile` uses Inductor, which takes 10 s to compile a step.
FIT_MODES = [
    pytest.param({"run_eagerly": True}, id="eagerly"),
    pytest.param({"jit_compile": False}, id="compiled"),
    pytest.param({"jit_compile": True}, id="jit", marks=pytest.mark.slow if BACKEND == "torch" else ()),
]


EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_of(notebook: Any) -> str:
    """Return a digest of the code of a notebook, to which its outputs belong."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(repr(cells).encode()).hexdigest()


_PRINTED = re.compile(r"^ *print\(.*\)(?:  |\n *)# (?!such as )(.*)$", re.MULTILINE)
_WORD = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|\binf\b)|[^\W\d]\w*")


def _words(text: str) -> list[float | str]:
    """Return the numbers and the words of a text. NaN is a word, because it does not equal itself."""
    numeric = re.compile(r"-?(\d|inf$)")
    return [float(word) if numeric.match(word) else word for word in _WORD.findall(text)]


def check_comments(example: str, output: str) -> None:
    """Compare the output of an example with the comments after each `print`, or on the line below it."""
    said = [word for comment in _PRINTED.findall(example) for word in _words(comment)]
    # The output of a tensor contains more than its numbers, so the words only need to occur in this order.
    printed = iter(_words(output))
    assert all(any(word == wanted for word in printed) for wanted in said), (said, output)


@multigrad.op_custom_gradient
def seven(x):
    """Return `x`. Its gradient is seven times too large."""
    return x * 1.0, lambda upstream: upstream * 7.0


class Phase(keras.layers.Layer):
    """A layer with different results in training and inference."""

    def call(self, x, training=None):
        return x * (3.0 if training else 1.0)


def array(*values: Any, dtype: str = "float32") -> Any:
    """Return a tensor of the active backend."""
    return ops.convert_to_tensor(np.array(values[0] if len(values) == 1 else values), dtype=dtype)


# The errors of second derivatives of functions that PyTorch compiled: of this package, and of PyTorch (2.13).
SECOND_OF_COMPILED = (
    "gradient of a compiled function",
    "does not currently support double backward",
    "compiled backward function within vmap",
    "compiled with non-empty donated buffers",
)


def numpy(value: Any) -> np.ndarray:
    """Return the value of a tensor."""
    return np.asarray(keras.ops.convert_to_numpy(value))


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Assert that two structures contain the same numbers."""
    keras.tree.assert_same_structure(got, wanted)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=tolerance, atol=tolerance)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as the backend traces it. PyTorch runs it uncompiled."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def compiled_with_variables(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function. `jax.jit` would treat the values of variables as constants."""
    return multigrad.jit(function) if BACKEND == "jax" else compiled(function)


def compiled_by_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as XLA compiles it. PyTorch runs it uncompiled."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    return compiled(function)


def native_jvp(function: Callable[..., Any], x: Any, along: Any) -> Any:
    """Return the Jacobian-vector product by the framework's own forward mode."""
    if BACKEND == "jax":
        import jax

        return jax.jvp(function, (x,), (along,))[1]
    if BACKEND == "torch":
        import torch

        return torch.func.jvp(function, (x,), (along,))[1]
    import tensorflow as tf

    with tf.autodiff.ForwardAccumulator(x, along) as forward:
        y = function(x)
    return forward.jvp(y, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations in a jaxpr and in all nested jaxprs."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(inner, (ClosedJaxpr, Jaxpr)):
                    yield from equations(getattr(inner, "jaxpr", inner))


def sizes_made(function: Callable[..., Any], *args: Any) -> list[int]:
    """Return the sizes of all tensors in a function, as the backend records them."""
    if BACKEND == "jax":
        import jax

        written = equations(jax.make_jaxpr(function)(*args).jaxpr)
        return [variable.aval.size for equation in written for variable in equation.outvars]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        graph = compiled(function).get_concrete_function(*args).graph.as_graph_def(add_shapes=True)
        nodes = [*graph.node, *[node for called in graph.library.function for node in called.node_def]]
        shapes = [tf.TensorShape(s) for node in nodes for s in node.attr["_output_shapes"].list.shape]
        return [shape.num_elements() for shape in shapes if shape.is_fully_defined()]
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            made = operation(*args, **(kwargs or {}))
            found.extend(t.numel() for t in keras.tree.flatten(made) if hasattr(t, "numel"))
            return made

    with Watch():
        function(*args)
    return found
