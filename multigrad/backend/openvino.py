"""OpenVINO, which has no derivatives: the forward pass runs, and a gradient is an error."""

import keras

from multigrad.closure import TypeSet
from multigrad.backend.numpy import apply, concrete, conform, is_differentiable, sizes, specs_of, value_and_grad

__all__ = ["TENSORS", "apply", "concrete", "conform", "is_differentiable", "sizes", "specs_of", "value_and_grad"]

# Keras's own class, which has no public name.
TENSORS = TypeSet(type(keras.ops.convert_to_tensor(0.0)))
