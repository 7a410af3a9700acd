"""Convert numbers and arrays among the arguments of a call to tensors, the same way in ops and in `grad`."""

from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import backend
from multigrad.common.reachable import may_hold_tensors
from multigrad.core.leaves import NON_NUMERIC, is_converted_type, to_tensor
from multigrad.core.structure import leaves_of, rebuild


def numbers_to_tensors(args: tuple[Any, ...], others: Any) -> tuple[Any, ...]:
    """Return `args` with Python floats and complex numbers as tensors, if the call has no tensor.

    Beside a tensor, such a number is a constant, as for `keras.ops`. In a call without tensors, the numbers
    are the tensors of the call. So `op(2.0, 3.0)` and `grad(op)(2.0, 3.0)` run the same function.

    Arguments:
        args: the arguments that are passed by position.
        others: the other arguments. An option such as `rate=0.1`, which is passed by name, stays a number.
    """
    if not any([type(arg) in _NUMBERS for arg in args]):
        return args  # a list of floats is static
    if any(map(_may_hold_tensors, leaves_of((args, others)))):
        return args
    return tuple(map(number_to_tensor, args))


_NUMBERS = float, complex


def _may_hold_tensors(leaf: Any) -> bool:
    kind = type(leaf)
    return backend.active.TENSORS[kind] or is_converted_type(kind) or may_hold_tensors(leaf)


def number_to_tensor(leaf: Any) -> Any:
    """Return a Python float or complex number as a tensor of Keras's floatx, and other objects unchanged."""
    if type(leaf) not in _NUMBERS:
        return leaf
    dtype = keras.config.floatx()
    if type(leaf) is complex:
        dtype = "complex128" if dtype == "float64" else "complex64"
    return ops.convert_to_tensor(leaf, dtype)


def arrays_to_tensors(structure: Any) -> Any:
    """Return the structure with floating NumPy arrays and arrays of other frameworks as tensors.

    Integer NumPy arrays, such as indices, are converted only if the framework cannot combine them with
    recorded tensors (PyTorch). NumPy scalars and other leaves are returned unchanged.
    """
    if not any(_is_converted(leaf) for leaf in leaves_of(structure)):
        return structure
    return rebuild(structure, lambda leaf: to_tensor(leaf) if _is_converted(leaf) else leaf)


def _is_converted(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray):
        return backend.active.FOREIGN[type(leaf)]
    if leaf.dtype.kind in NON_NUMERIC or leaf.dtype.names is not None:
        return False  # JAX's float0 is a structured dtype
    return leaf.dtype.kind not in "biu" or backend.active.FOREIGN[type(leaf)]
