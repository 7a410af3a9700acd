"""A training step with taps on JAX.

The step is a function of the state. `slots` are differentiated together with the trainable variables, and the
statistics of outputs leave the loss together with the other state. Both are removed before `fit` sees them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from multigrad.callbacks.steps.base import ENTRY, Training
from multigrad.tracing.recording import TAPS, replacing


class JaxTraining(Training):
    """The training step of a model with taps."""

    def step(self, *args: Any) -> Any:
        taps, (state, data) = TAPS.get(), args
        if not taps.has_layers:
            logs, state = self._step(state, data)
            return {**logs, ENTRY: taps.gather()}, state
        # Find the names of the taps. A new function each time, because JAX caches what it has traced.
        jax.eval_shape(functools.partial(self._step), state, data)
        taps.slots = [keras.ops.zeros((taps.SIZE,), "float32") for _ in taps.names]
        logs, state = self._step(([*state[0], taps.slots], *state[1:]), data)
        trainable, (*non_trainable, taps.outputs), *others = state
        return {**logs, ENTRY: taps.gather()}, (trainable, non_trainable, *others)

    def state(self, args: Sequence[Any]) -> Any:
        trainable, non_trainable, optimizer, _ = args[0]  # not the metrics
        return keras.tree.map_structure(keras.ops.copy, [trainable, non_trainable, optimizer])

    def with_state(self, result: Any, state: Any) -> Any:
        logs, (_, _, _, metrics) = result
        return logs, (*state, metrics)

    def _methods_with_taps(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        model, optimizer = self.model, self.model.optimizer
        loss, apply, untapped = model.compute_loss_and_updates, optimizer.stateless_apply, optimizer.apply

        def loss_with_tap(values: Any, *args: Any, **kwargs: Any) -> Any:
            taps = TAPS.get()
            if taps is None or not taps.has_layers:
                return loss(values, *args, **kwargs)
            if taps.slots is None:
                with taps.open(counting=True):
                    return loss(values, *args, **kwargs)
            *values, taps.slots = values
            with taps.open():
                total, (unscaled, y, non_trainable, metrics) = loss(values, *args, **kwargs)
            return total, (unscaled, y, [*non_trainable, taps.outputs], metrics)

        def stateless_apply_with_tap(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            taps = TAPS.get()
            if taps is not None:
                if taps.slots is not None:
                    *grads, rows = grads
                    *trainable_variables, _ = trainable_variables
                    taps.upstream = dict(enumerate(rows))
                with keras.StatelessScope(
                    state_mapping=list(zip(optimizer.variables, optimizer_variables, strict=True))
                ):
                    scale = optimizer.scale_loss(keras.ops.ones(()))
                    names = [variable.path for variable in model.trainable_variables]
                    taps.see(grads, names, trainable_variables, scale)
            with replacing(optimizer, "apply", untapped):  # which `stateless_apply` calls
                return apply(optimizer_variables, grads, trainable_variables)

        return [
            (model, "compute_loss_and_updates", loss_with_tap),
            (optimizer, "stateless_apply", stateless_apply_with_tap),
            (optimizer, "apply", self._apply_with_tap()),  # in a `keras.StatelessScope`
        ]
