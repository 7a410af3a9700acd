"""Functions that check gradients, for the tests of rules.

`check_gradients` compares a rule with the central differences of its function. `compare_backends` compares
the installed backends with each other. `multigrad` does not import this package.
"""

from multigrad import backend as _backend  # noqa: F401  checks the environment before Keras is imported
from multigrad.testing.comparison import compare_backends
from multigrad.testing.gradient_check import check_gradients

__all__ = ["check_gradients", "compare_backends"]
