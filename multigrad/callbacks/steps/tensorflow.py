"""A training step with taps on TensorFlow."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from multigrad.callbacks.steps.base import Training


class TensorFlowTraining(Training):
    """The training step of a model with taps. Under a `tf.distribute` strategy, each replica runs it."""

    def _sum_over_replicas(self, gradients: Sequence[Any]) -> Sequence[Any]:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return gradients
        dense = {i: tf.convert_to_tensor(g) for i, g in enumerate(gradients) if g is not None}
        if dense:
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, list(dense.values()))
            dense = dict(zip(dense, sums, strict=True))
        return [dense.get(i) for i in range(len(gradients))]

    def _gather_over_replicas(self, entry: dict[str, Any]) -> dict[str, Any]:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return entry
        layers = {names: context.all_gather(rows[None], axis=0) for names, rows in entry["layers"].items()}
        return {**entry, "layers": layers}
