"""What a leaf of a structure is: a tensor, a static object, or something that an op refuses."""

import weakref
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from multigrad import backend
from multigrad.backend.base import to_numpy
from multigrad.common.errors import OpError, message

TENSOR, CONVERTED, NESTED, STATIC, SPARSE, RAGGED, SYMBOLIC, STAND_IN = range(8)

NON_NUMERIC = "OSUMm"
"""The kinds of NumPy dtypes that no tensor has: objects, text and times."""

_KINDS: dict[type, int] = {}
STATIC_CLASSES: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of static leaves, which users may define in every call. Dynamo cannot trace a WeakSet."""
_TENSORS = backend.active.TENSORS


def kind_of(leaf: Any) -> int:
    cls = type(leaf)
    kind = _KINDS.get(cls)
    if kind is None:
        reading = backend.active.is_reading_code()
        if not reading and cls in STATIC_CLASSES:
            return STATIC
        if _TENSORS[cls]:
            kind = TENSOR
        elif issubclass(cls, keras.KerasTensor):
            kind = SYMBOLIC
        elif is_converted_type(cls):
            kind = CONVERTED
        elif backend.active.STAND_INS[cls]:
            kind = STAND_IN
        elif ops.is_tensor(leaf):  # a tensor for Keras, but not dense
            kind = RAGGED if hasattr(cls, "nested_row_splits") else SPARSE
        else:
            kind = NESTED if tree.is_nested(leaf) else STATIC
        if reading:  # Dynamo (PyTorch 2.13) rejects a change of the dict in a rule as a side effect
            return kind
        if kind != STATIC or cls.__module__ == "builtins":
            _KINDS[cls] = kind
        else:
            STATIC_CLASSES.add(cls)
    return kind


def is_converted_type(kind: type) -> bool:
    """Return whether objects of a type are converted to tensors: arrays of any framework, and variables."""
    return backend.active.CONVERTIBLE[kind] or backend.active.FOREIGN[kind]


def to_tensor(value: Any) -> Any:
    """Return a number, a variable or an array of any framework as a tensor."""
    if backend.active.FOREIGN[type(value)] and not isinstance(value, np.ndarray):
        value = to_numpy(value)
    return backend.active.as_tensor(value)


def is_inferring_shapes() -> bool:
    """Return whether Keras runs this code on placeholders, to infer the shape of a layer's output.

    For Keras (3.15), `2.0 * x` of a KerasTensor is sparse, so the placeholder for the next layer is sparse.
    When this layer runs, its input is dense.
    """
    with keras.SymbolicScope() as scope:
        return scope.original_scope is not None


REFUSALS: dict[int, tuple[Any, ...]] = {
    SPARSE: (
        "a sparse tensor has no gradient that works on every backend",
        "a sparse tensor",
        "a dense tensor",
        "pass its values as a dense tensor",
        "limits#sparse-tensors",
    ),
    RAGGED: (
        "a ragged tensor cannot be the argument or output of an op",
        "a ragged tensor",
        "a dense tensor",
        "call tf.ragged.map_flat_values(op, x) if the op is elementwise; otherwise pad x with x.to_tensor()",
    ),
    SYMBOLIC: (
        "the function uses a symbolic tensor that is not an argument of the op",
        "a KerasTensor",
        "a tensor",
        "pass the symbolic tensor to the op as an argument",
    ),
    STAND_IN: (
        "torch.fx records the program without its gradients",
        "a stand-in of torch.fx for a tensor",
        "a tensor",
        "record it with torch.export, or compile it with torch.compile",
        "limits#export",
    ),
    STATIC: (
        "tensors are in an object of an unknown class, in which multigrad does not look for them",
        None,
        "a tuple, list or dict, or a class that is registered with keras.tree",
        "put them into a plain container",
        "limits#no-side-effects",
    ),
}


class Refused(Exception):
    """Raised for a leaf that no op can take or return."""

    def __init__(
        self, leaf: Any, problem: str, got: str | None, required: str, fix: str, see: str | None = None
    ) -> None:
        super().__init__(problem)
        self._leaf, self._problem, got = leaf, problem, got or f"an object of the class {type(leaf).__name__}"
        self._lines: dict[str, Any] = {"required": required, "got": got, "fix": fix, "see": see}

    def error(self, op: str, named: Iterable[tuple[str, Any]]) -> OpError:
        """Return the error with the name of the op, and the name of the value that holds the leaf."""
        name = next((n for n, value in named if any(self._leaf is x for x in tree.flatten(value))), None)
        return OpError(message(op, self._problem, argument=name, **self._lines))


class Symbolic(Refused):
    """Raised for a symbolic tensor. An op with one among its arguments is a node of a Functional model."""
