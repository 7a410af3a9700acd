"""What the tests say the same on every backend."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()
DIFFERENTIATES = BACKEND in ("tensorflow", "jax", "torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def code_of(notebook: Any) -> str:
    """A digest of a notebook's code, which its outputs belong to."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(repr(cells).encode()).hexdigest()


def array(*values: Any, dtype: str = "float32") -> Any:
    """A tensor of the active backend."""
    return ops.convert_to_tensor(np.array(values[0] if len(values) == 1 else values), dtype=dtype)


def numpy(value: Any) -> np.ndarray:
    """A tensor's value."""
    return np.asarray(keras.ops.convert_to_numpy(value))


def close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Assert that two structures hold the same numbers."""
    keras.tree.assert_same_structure(got, wanted)
    for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        np.testing.assert_allclose(numpy(a), numpy(b), rtol=tolerance, atol=tolerance)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the backend traces it; PyTorch runs it as it is."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function
