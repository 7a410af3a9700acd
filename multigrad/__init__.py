"""Custom gradients for Keras 3: one definition, the same on TensorFlow, JAX and PyTorch."""

from multigrad.calculus import grad, value_and_grad
from multigrad.custom_gradient import op_custom_gradient

__version__ = "0.1.0"

__all__ = ["__version__", "grad", "op_custom_gradient", "value_and_grad"]
