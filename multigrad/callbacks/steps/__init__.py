"""The training step with taps, one module per framework. Only that of the active framework is imported."""

import importlib

import keras

from multigrad.callbacks.steps.base import Training
from multigrad.common.errors import message

_CLASSES = {"tensorflow": "TensorFlowTraining", "jax": "JaxTraining", "torch": "TorchTraining"}
"""The class in the module of each framework."""


def training_of(model: keras.Model) -> Training:
    """Return the training step of a compiled model, with taps."""
    name = keras.backend.backend()
    if name not in _CLASSES:
        raise NotImplementedError(
            message(
                "GradientLogger",
                "this backend has no training step with taps",
                required=f"one of the backends {', '.join(_CLASSES)}",
                got=name,
                fix="set the environment variable KERAS_BACKEND before Keras is imported",
                see="limits#numpy-and-openvino",
            )
        )
    module = importlib.import_module(f"{__name__}.{name}")
    training: Training = getattr(module, _CLASSES[name])(model)
    return training
