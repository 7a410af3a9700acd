"""`host_call` on JAX: `jax.pure_callback` where something is traced."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from multigrad.backend.base import HostFunction, TensorSpec
from multigrad.backend.jax.tensors import any_traced, is_compiling
from multigrad.common.errors import message


def host_call(
    function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
) -> list[Any]:
    unknown = [size for tensor in tensors for size in tensor.shape if jax.export.is_symbolic_dim(size)]
    results = [
        # Where Keras asks for shapes, the size of the batch is symbolic, and None in the specs.
        jax.ShapeDtypeStruct([unknown[0] if n is None else n for n in shape], _dtype(function.name, dtype))
        for shape, dtype in specs
    ]
    if not (any_traced(tensors) or is_compiling()):
        return [jnp.asarray(array) for array in function([np.asarray(tensor) for tensor in tensors])]
    method = "broadcast_all" if vectorized else "sequential"
    return jax.pure_callback(
        lambda *arrays: function.in_program([np.asarray(array) for array in arrays]),
        results,
        *tensors,
        vmap_method=method,
    )


def _dtype(name: str, dtype: str) -> Any:
    own = jax.dtypes.canonicalize_dtype(dtype)
    if own.name != dtype:
        raise TypeError(
            message(
                name,
                "JAX computes without 64-bit numbers here",
                argument="'output'",
                required=f"the dtype {own.name}, or the option jax_enable_x64",
                got=f"the dtype {dtype}",
                fix=f"declare an output of dtype {own.name}, and return an array of this dtype",
            )
        )
    return own
