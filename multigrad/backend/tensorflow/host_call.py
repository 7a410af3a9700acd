"""`host_call` on TensorFlow: `tf.numpy_function` in a graph."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.base import HostFunction, TensorSpec
from multigrad.backend.tensorflow import private
from multigrad.backend.tensorflow.tapes import note_host_call
from multigrad.backend.tensorflow.tensors import library_code

opaque_to_compiler = library_code


def host_call(
    function: HostFunction, tensors: Sequence[Any], specs: Sequence[TensorSpec], vectorized: bool
) -> list[Any]:
    note_host_call(tensors)
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in function([tensor.numpy() for tensor in tensors])]
    # Nested accumulators (TensorFlow 2.21) fail for this operation. The op around it is recorded.
    with private.stop_recording():
        results = tf.numpy_function(
            lambda *arrays: function.in_program(arrays),
            list(tensors),
            [tf.as_dtype(dtype) for _, dtype in specs],
            stateful=False,
            name="host_call_cannot_run_with_jit_compile",  # XLA names it in its error
        )
    for result, (shape, _) in zip(results, specs, strict=True):
        result.set_shape(shape)
    return results
