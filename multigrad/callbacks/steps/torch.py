"""A training step with taps on PyTorch."""

from collections.abc import Callable
from typing import Any

from multigrad.callbacks.steps.base import Training


class TorchTraining(Training):
    """The training step of a model with taps. It always runs uncompiled.

    Dynamo breaks the graph at each tap, and would compile the parts again in each step.
    """

    def function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda data: step(data[0])
