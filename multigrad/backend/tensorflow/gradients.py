"""`value_and_grad` and `vjp` of functions of flat tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from multigrad.common.keras_internals import stored_value


def value_and_grad(
    function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any], variables: Sequence[keras.Variable]
) -> tuple[tuple[Any, Any], list[Any]]:
    # Copies, because the function may close over the same tensors.
    sources = [tf.identity(tensor) for tensor in tensors]
    stored = _stored_variables(variables)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([*sources, *stored])
        value, aux = function(*sources)
    gradients = tape.gradient(value, [*sources, *stored])
    return (value, aux), _totals(gradients, sources)


def _stored_variables(variables: Sequence[keras.Variable]) -> list[Any]:
    """Return the variables of TensorFlow, which a `tf.function` reads instead of the sources."""
    stored = [stored_value(variable) for variable in variables]
    if tf.distribute.in_cross_replica_context():  # the first replica's variable is read
        local = tf.distribute.get_strategy().experimental_local_results
        stored = [local(value)[0] for value in stored]
    return stored


def _totals(gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Return the gradient of each source, plus that of its stored variable.

    The gradients of the stored variables follow those of the sources, and belong to the last ones.
    """
    count = len(sources)
    of_stored = [*[None] * (2 * count - len(gradients)), *gradients[count:]]
    return list(map(_total, sources, gradients[:count], of_stored))


def _total(source: Any, gradient: Any, of_stored: Any) -> Any:
    """Return the sum of the gradients of a source and its stored variable. None is zero."""
    parts = [tf.cast(part, source.dtype) for part in (gradient, of_stored) if part is not None]
    return tf.convert_to_tensor(tf.add_n(parts) if parts else tf.zeros_like(source))


def vjp(
    function: Callable[..., tuple[Sequence[Any], Any]],
    tensors: Sequence[Any],
    variables: Sequence[keras.Variable] = (),
) -> tuple[tuple[Sequence[Any], Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    sources = [tf.identity(tensor) for tensor in tensors]
    stored = _stored_variables(variables)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch([*sources, *stored])
        outputs, aux = function(*sources)
        # Copies, because the rule of an op may use an output as a residual, which has a gradient of its
        # sources.
        targets = [tf.identity(output) for output in outputs]

    def pullback(upstream: Sequence[Any]) -> list[Any]:
        gradients = tape.gradient(targets, [*sources, *stored], list(upstream))
        return _totals(gradients, sources)

    return (outputs, aux), pullback


def solve(matrices: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    # `tf.linalg.solve` (2.21) raises an error for all matrices if one is singular, and XLA has no
    # determinants. A column that depends on those before it has a diagonal element of zero, up to rounding.
    q, r = tf.linalg.qr(matrices)
    diagonal, tiny = tf.abs(tf.linalg.diag_part(r)), 8.0 * np.finfo(r.dtype.as_numpy_dtype).eps
    regular = tf.reduce_all(diagonal > tiny * tf.norm(r, axis=-2), axis=-1)[..., None, None]
    r = tf.where(regular, r, tf.linalg.diag(tf.ones_like(diagonal)))
    solved = tf.linalg.triangular_solve(r, tf.matmul(q, right, transpose_a=True), lower=False)
    return tf.where(regular, solved, np.nan)


def reshape(tensor: Any, *likes: Any) -> Any:
    return tf.reshape(tensor, tf.concat([tf.shape(like) for like in likes], 0))
