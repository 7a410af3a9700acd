"""Tensors to NumPy arrays and back, fixed pseudo-random weights, and the vjp of a flat function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a copy of a concrete tensor as an array of float64 or complex128."""
    value = backend.active.concrete(tensor)
    assert value is not None, "a traced tensor has no value"
    return np.array(value, np.complex128 if np.iscomplexobj(value) else np.float64)


def to_tensors(arrays: Sequence[np.ndarray], like: Sequence[Any]) -> list[Any]:
    """Return arrays as tensors, in the dtypes of the tensors `like`."""
    return [
        ops.convert_to_tensor(array, dtype=keras.backend.standardize_dtype(tensor.dtype))
        for array, tensor in zip(arrays, like, strict=True)
    ]


def random_weights(tensors: Sequence[Any], seed: int) -> Iterator[np.ndarray]:
    """Yield pseudo-random arrays in the shapes of tensors, with absolute values from 1 to 2 and either sign.

    The seed is fixed, so that the numbers are the same in every run and on every backend. For a complex
    tensor they are complex.
    """
    generator = np.random.default_rng(seed)
    for tensor in tensors:
        shape = tuple(tensor.shape)
        weights = generator.uniform(1.0, 2.0, shape) * generator.choice((-1.0, 1.0), shape)
        is_complex = np.iscomplexobj(to_numpy(tensor))
        phase = np.exp(1j * generator.uniform(0.0, 1.0, shape)) if is_complex else 1.0
        yield np.asarray(weights * phase)


def flat_vjp(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any]
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    """Return the outputs of a function of flat tensors, and its pullback."""
    (outputs, _), pullback = backend.active.vjp(lambda *tensors: (function(*tensors), None), list(inputs))
    return outputs, pullback
