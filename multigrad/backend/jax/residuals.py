"""Whether the residuals of a rule are intermediate results of its function."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from multigrad.backend.base import Call, Run
from multigrad.backend.jax import private
from multigrad.backend.jax.tensors import FLOATING
from multigrad.common.closure import lift
from multigrad.common.reachable import reachable_tensors
from multigrad.common.type_sets import TypeSet

_HOST_ARRAYS = TypeSet(np.ndarray, np.generic)
_ARRAYS = TypeSet(jax.Array, jax.core.Tracer, np.ndarray, np.generic)


def constants_of(call: Call) -> list[Any]:
    """Return the arrays that a function can reach before it runs. Later, it may have stored further ones."""
    return [array for root in (call.f, *call.objects()) for array in reachable_tensors(root, _ARRAYS)]


def uses_intermediate(run: Run, constants: Sequence[Any]) -> bool:
    """Return whether the rule uses an array that may depend on the inputs, other than inputs and outputs.

    The derivative of such an array goes through the function.

    Arguments:
        run: a run.
        constants: the arrays that the function could use before it ran.
    """
    known, others = set(map(id, constants)), [x for x in run.other_residuals() if FLOATING[x.dtype]]
    # Operations on tracers return tracers. Operations on a `WithoutTangent` return concrete arrays.
    are_concrete = any([isinstance(x, private.WithoutTangent) for x in run.inputs])
    if not are_concrete:
        others = [array for array in others if isinstance(array, jax.core.Tracer)]
    if any([id(array) not in known for array in others]):
        return True
    # With concrete arrays, the function may also have computed a NumPy array.
    on_host = lift(run.user_rule, _HOST_ARRAYS)[0] if are_concrete else ()
    return any([id(x) not in known and (x.dtype == object or FLOATING[x.dtype]) for x in on_host])
