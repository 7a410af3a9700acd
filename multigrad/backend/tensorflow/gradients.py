"""`value_and_grad`, `vjp` and `jacobian` of functions of flat tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from multigrad.backend.tensorflow.programs import has_xla
from multigrad.backend.tensorflow.tapes import may_record, require_tapes


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: int
) -> tuple[tuple[Any, Any], list[Any]]:
    require_tapes()
    # Copies, because the function may close over the same tensors.
    sources = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        value, aux = function(*sources)
    gradients = tape.gradient(value, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return (value, aux), [tf.convert_to_tensor(gradient) for gradient in gradients]


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    require_tapes()
    sources = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs, aux = function(*sources)
        # Copies, because the rule of an op may use an output as a residual, which has a gradient of its
        # sources.
        targets = [tf.identity(output) for output in outputs]

    def pull(upstream: Sequence[Any]) -> list[Any]:
        gradients = tape.gradient(targets, sources, list(upstream), tf.UnconnectedGradients.ZERO)
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    return (outputs, aux), pull


def jacobian(
    function: Callable[..., tuple[Sequence[Any], Any]], tensors: Sequence[Any]
) -> tuple[Any, list[list[Any]]]:
    require_tapes()
    sources = [tf.identity(tensor) for tensor in tensors]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs, aux = function(*sources)
    zero = tf.UnconnectedGradients.ZERO
    return aux, [list(tape.jacobian(output, sources, unconnected_gradients=zero)) for output in outputs]


def gradients_expected(tensors: Sequence[Any]) -> list[bool]:
    return [may_record() and (tf.executing_eagerly() or has_xla())] * len(tensors)
