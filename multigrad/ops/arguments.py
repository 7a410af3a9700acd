"""What an op is given, as a tensor."""

from typing import Any

import keras
from keras import ops, tree


def as_tensor(value: Any) -> Any:
    """A tensor, with its history, of what can be one; a symbolic tensor as it is.

    `keras.ops.convert_to_tensor` (3.15) makes one without a history of a list of tensors, on PyTorch.
    """
    if isinstance(value, keras.KerasTensor):
        return value
    if isinstance(value, (list, tuple)) and any(map(ops.is_tensor, tree.flatten(value))):
        return ops.stack([as_tensor(part) for part in value])
    return ops.convert_to_tensor(value)
