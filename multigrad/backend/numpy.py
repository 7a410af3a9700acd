"""NumPy, which has no derivatives: the forward pass runs, and a gradient is an error.

Because nothing is differentiable here, no rule is ever called, and nothing asks for a spec.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from multigrad.backend import Call, HostFunction, TensorSpec
from multigrad.backend.usual import (  # noqa: F401 - names of `Backend`
    after,
    as_tensor,
    assign,
    constant,
    defaults_of,
    host_code,
    is_constant,
    is_reading_code,
    jit,
    library_code,
    program,
    sizes,
    snapshot,
    uncompiled,
    unrecorded,
)
from multigrad.frameworks import DIFFERENTIATING
from multigrad.kinds import TypeSet

TENSORS = TypeSet(np.ndarray)
CONVERTIBLE = TypeSet(keras.Variable, np.ndarray, np.generic)
FOREIGN = STAND_INS = TypeSet()


def is_differentiable(tensor: Any) -> bool:
    return False


def specs_of(tensors: Sequence[Any]) -> list[None]:
    return [None] * len(tensors)


def conform(gradient: Any, spec: Any) -> NoReturn:
    raise _no_gradients()


def concrete(tensor: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def apply(call: Call, tensors: Sequence[Any]) -> Any:
    outputs, _, _, back = call.run(tensors)
    return back.output.join(outputs)


def host_call(
    function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
) -> Sequence[Any]:
    arrays = function([np.asarray(keras.ops.convert_to_numpy(tensor)) for tensor in tensors])
    return [as_tensor(array) for array in arrays]


def value_and_grad(function: Callable[..., Any], tensors: Sequence[Any], variables: int) -> NoReturn:
    raise _no_gradients()


def vjp(function: Callable[..., Any], tensors: Sequence[Any]) -> NoReturn:
    raise _no_gradients()


def jacobian(function: Callable[..., Any], tensors: Sequence[Any]) -> NoReturn:
    raise _no_gradients()


def may_record() -> NoReturn:
    raise _no_gradients()


def needs_plain_rule() -> NoReturn:
    raise _no_gradients()


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    return [False] * len(tensors)


def compiled(function: Callable[..., Any]) -> NoReturn:
    raise _no_gradients()


def wide() -> NoReturn:
    raise _no_gradients()


def observe(callback: Callable[..., None], tensors: Sequence[Any]) -> None:
    callback(*[np.array(keras.ops.convert_to_numpy(tensor)) for tensor in tensors])


def is_compiling() -> bool:
    return False


def _no_gradients() -> NotImplementedError:
    return NotImplementedError(
        f"Keras's {keras.backend.backend()} backend computes no gradients. Those that do are "
        f"{', '.join(DIFFERENTIATING)}: choose one with the environment variable KERAS_BACKEND before "
        "Keras is imported."
    )
