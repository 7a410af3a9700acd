"""Kinds of object: which are tensors, and which hold none."""

import enum
import types

import numpy as np

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made in Python, and can be freed
_USUAL = type(None), bool, int, float, complex, str, tuple, list, dict, types.FunctionType


class TypeSet(dict[type, bool]):
    """Membership of types in a class hierarchy, looked up once per type.

    Classes that are no members are remembered only where they live as long as the process. Those that
    everything is made of are known from the start: a compiler of Python that traces through here, such as
    PyTorch's, can keep nothing for later inside of a rule, and compiles anew where something was kept.

    ```python
    floats = TypeSet(float)
    assert floats[float] and not floats[int]
    ```
    """

    def __init__(self, *bases: type) -> None:
        super().__init__({kind: issubclass(kind, bases) for kind in (*_USUAL, *bases)})
        self._bases = bases

    def __missing__(self, kind: type) -> bool:
        found = issubclass(kind, self._bases)
        if found or not kind.__flags__ & _HEAP_TYPE:
            self[kind] = found
        return found


class HoldsNoTensor:
    """A base of classes whose objects are never in the way of lifting."""

    __slots__ = ()


# Kinds of object that hold no tensor of a call, whatever else they are.
ATOMS = TypeSet(
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), slice, range,
    enum.Enum, np.dtype, np.generic, np.ndarray, np.ufunc, HoldsNoTensor,
)  # fmt: skip
