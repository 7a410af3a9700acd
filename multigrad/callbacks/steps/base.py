"""One training step of a Keras model, with taps on its layers and weights.

`Training` is for frameworks whose variables hold their values while a step runs. JAX passes the values
through the step, and overrides what differs.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from multigrad.tracing.recording import TAPS, replacing

ENTRY = "multigrad_taps"
"""The entry of a step's logs with the statistics, which the training loop never sees."""


class Training:
    """The training step of a model with taps.

    Arguments:
        model: a compiled model.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._step = model, model.train_step
        self._methods = self._methods_with_taps()

    def step(self, *args: Any) -> Any:
        """Run the model's `train_step` with taps. Its logs have one more entry, `ENTRY`."""
        taps = TAPS.get()
        with taps.open():
            logs = self._step(*args)
        return {**logs, ENTRY: self._gather_over_replicas(taps.gather())}

    def function(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that `fit` calls for each step, made from another `train_step`."""
        model, plain = self.model, self.model.train_function
        try:
            with replacing(model, "train_step", step):
                model.make_train_function(force=True)
            return model.train_function
        finally:
            model.train_function = plain

    def run(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[dict[str, Any], Any]:
        """Call this function as `fit` does. Return the entry, and the result without it."""
        with self._tap_methods():
            result = function(*args)
        logs = result[0] if isinstance(result, tuple) else result  # on JAX, the state follows
        return logs.pop(ENTRY), result

    def state(self, args: Sequence[Any]) -> Any:
        """Return a copy of the weights and of the optimizer's state. `args` are those of the function."""
        return [keras.ops.copy(variable.value) for variable in self._variables()]

    def with_state(self, result: Any, state: Any) -> Any:
        """Restore this state, and return the result of a function that `fit` shall see."""
        for variable, value in zip(self._variables(), state, strict=True):
            variable.assign(value)
        return result

    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.model.optimizer.variables]

    def _methods_with_taps(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return the methods with taps: their owner and name, and what replaces them while a step runs."""
        optimizer = self.model.optimizer
        scale_loss = optimizer.scale_loss

        def scale_loss_with_tap(loss: Any) -> Any:
            if (taps := TAPS.get()) is not None:
                taps.close()  # a layer that is called from now on recomputes its output
            return scale_loss(loss)

        return [(optimizer, "apply", self._apply_with_tap()), (optimizer, "scale_loss", scale_loss_with_tap)]

    def _apply_with_tap(self) -> Callable[..., Any]:
        """Return the optimizer's `apply` with taps on the gradients and weights."""
        optimizer = self.model.optimizer
        apply, scale_loss = optimizer.apply, optimizer.scale_loss

        def apply_with_tap(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            taps, variables = TAPS.get(), trainable_variables or self.model.trainable_variables
            if taps is not None:
                scale = scale_loss(keras.ops.ones(()))
                names = [variable.path for variable in variables]
                values = [variable.value for variable in variables]
                taps.see(self._sum_over_replicas(grads), names, values, scale)
            return apply(grads, trainable_variables)

        return apply_with_tap

    @contextlib.contextmanager
    def _tap_methods(self) -> Iterator[None]:
        # Around the function and not in the step, which may be traced by several threads at once.
        with contextlib.ExitStack() as stack:
            for owner, name, method in self._methods:
                stack.enter_context(replacing(owner, name, method))
            yield

    def _sum_over_replicas(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients, summed over the replicas of the model."""
        return gradients

    def _gather_over_replicas(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the entry with the statistics of layers on each replica of the model."""
        return entry
