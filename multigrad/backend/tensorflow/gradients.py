"""Gradients of functions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.programs import has_xla
from multigrad.backend.tensorflow.tapes import may_record, require_tapes


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
) -> tuple[tuple[Any, Any], list[Any]]:
    require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]  # apart from the same tensor closed over
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(own)
        value, aux = function(*own)
    gradients = tape.gradient(value, own, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return (value, aux), [tf.convert_to_tensor(gradient) for gradient in gradients]


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(own)
        outputs, aux = function(*own)
        # Of these alone the tape is asked: an op that returns an output has another one in its rule.
        ends = [tf.identity(output) for output in outputs]

    def pull(upstream: Sequence[Any]) -> list[Any]:
        gradients = tape.gradient(ends, own, list(upstream), tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    return (outputs, aux), pull


def jacobian(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[Any, list[list[Any]]]:
    require_tapes()
    own = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(own)
        outputs, aux = function(*own)
    zero = tf.UnconnectedGradients.ZERO
    return aux, [list(tape.jacobian(output, own, unconnected_gradients=zero)) for output in outputs]


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    return [may_record() and (tf.executing_eagerly() or has_xla())] * len(tensors)
