"""Sets of types: the types of tensors, and the types whose objects hold no tensor."""

import enum
import itertools
import types

import keras
import numpy as np

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was defined in Python, and can be freed
_COMMON_TYPES = type(None), bool, int, float, complex, str, tuple, list, dict, types.FunctionType


class TypeSet(dict[type, bool]):
    """The subclasses of some base classes. Each type is looked up once, and the answer is cached.

    A class that is not a member is cached only if it lives as long as the process. The most common types are
    cached from the start. Dynamo traces this code, cannot write to the cache inside of a rule, and recompiles
    when the cache has changed.

    ```python
    floats = TypeSet(float)
    assert floats[float] and not floats[int]
    ```
    """

    def __init__(self, *bases: type) -> None:
        self.bases = bases
        super().__init__()
        for kind in (*_COMMON_TYPES, *bases):
            self[kind] = self[kind]

    def __missing__(self, kind: type) -> bool:
        member = issubclass(kind, self.bases)
        if member or not kind.__flags__ & _HEAP_TYPE:
            self[kind] = member
        return member


class ForeignArrays(TypeSet):
    """The types of arrays, by DLPack or `__array__`, that are not subclasses of some base classes."""

    def __missing__(self, kind: type) -> bool:
        is_array = hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")
        owned = (*self.bases, keras.Variable, keras.KerasTensor, np.generic)
        member = is_array and not issubclass(kind, owned)
        if member or not kind.__flags__ & _HEAP_TYPE:
            self[kind] = member
        return member


class HoldsNoTensor:
    """A base class for objects that hold no tensor of a call."""

    __slots__ = ()


class Transparent:
    """A base class for objects whose attributes a rule closes over directly, like the items of a tuple."""


# Types whose objects hold no tensor of a call.
ATOMS = TypeSet(
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented), slice, range,
    enum.Enum, itertools.count, np.dtype, np.generic, np.ndarray, np.ufunc, HoldsNoTensor,
)  # fmt: skip
