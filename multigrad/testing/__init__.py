"""Checks of gradients, for the tests of whoever writes rules.

`check_gradients` compares a rule with the differences of its function; `compare_backends` compares the
backends with each other, in a process each.
"""

from multigrad.testing.comparison import compare_backends
from multigrad.testing.gradient_check import check_gradients

__all__ = ["check_gradients", "compare_backends"]
