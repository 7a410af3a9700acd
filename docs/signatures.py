"""A griffe extension: the signature of an op as its callers see it.

The source of an op returns the pair `output, rule`, and the decorator makes it return the output.
"""

from typing import Any

import griffe

_PAIR = "Pair"  # of multigrad.ops: a tensor and its rule


class Signatures(griffe.Extension):
    """Show the return annotation of a decorated op, and one signature of the decorator."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the annotation of the pair by that of the output."""
        decorated = any("op_custom_gradient" in str(decorator.value) for decorator in func.decorators)
        if decorated and str(func.returns) == _PAIR:
            func.returns = "Tensor"
        if func.name == "op_custom_gradient":
            func.overloads = None  # for type checkers
