"""`GradientLogger`: record the gradients of layers and weights in a compiled `fit`.

`fit` reads `model.train_function` in each step. Before a recorded step, `on_train_batch_begin` replaces it by
a second function, which is created once and has taps on the layers. The second function first restores the
model's own function, so steps that are not recorded run as without the logger.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from multigrad.callbacks.records import GradientRecord, diagnose, read
from multigrad.callbacks.steps import training_of
from multigrad.callbacks.steps.base import Training
from multigrad.callbacks.table import format_record
from multigrad.callbacks.taps import Taps
from multigrad.common.errors import describe, message, unusable
from multigrad.ops.arguments import to_python
from multigrad.tracing.recording import TAPS, hooking_layers, setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class GradientLogger(keras.callbacks.Callback):
    """Record the norms of outputs and gradients, and NaN and Inf in them, in every n-th step of `fit`.

    ```python
    import keras
    import numpy as np
    from multigrad.callbacks import GradientLogger

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    logger = GradientLogger(every=2)
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, callbacks=[logger], verbose=0)
    print([record.step for record in logger.records])  # [0, 2]
    print(list(logger.records[0].upstream))  # ['first', 'dense']
    print(logger.records[0].upstream["first"].size)  # 6
    ```

    The logger records the step that trains the model, compiled as in `fit`. It creates a second training
    function with taps on the outputs of layers, and uses it for the recorded steps. All other steps run as
    without the logger, and the trained weights are the same.

    - Each layer is recorded by its path, such as `block/dense`. The second call of a layer is `dense#2`, and
      further tensors in an output are `dense[1]`.
    - Gradients are divided by the factor of a scaled loss, and are not clipped yet. With gradient
      accumulation, they are those of one batch.
    - The `logs` of `fit` get two entries: `gradient_norm`, the norm of the gradients of all weights, and
      `gradient_not_finite`, the fraction of their elements that are NaN or infinite. At the end of an epoch,
      they are those of the last recorded step. Only callbacks that follow the logger in the list see them.
    - Layers in a loop, branch, `vmap` or inner derivative, and the inner layers of `keras.layers.RNN` and
      `keras.layers.TimeDistributed`, are not recorded. If a model has its own `train_step`, only weights are
      recorded.
    - The second function is compiled when the first step is recorded, and kept for each further `fit`. On
      PyTorch, the recorded steps run uncompiled.

    Arguments:
        every: record each step whose number is a multiple of this. With `steps_per_execution`, the record is
            that of the last step that runs together with it. If `fit` does not know the number of batches, as
            for a generator, the last execution counts as a full one.
        stop_on_nan: whether to stop training after a recorded step with NaN or Inf, and to print where it
            began. The attribute `diagnosis` holds this line. An overflow that a `LossScaleOptimizer` handles
            does not count.
        restore_weights: whether to restore weights, state of layers and state of the optimizer from before
            this step. If the weights already contained NaN or Inf, the state of the previous recorded step is
            restored.

    Raises:
        ValueError: if an argument is invalid, or, in `fit`, if the model cannot be recorded.
    """

    async_safe = True  # otherwise Keras waits for each step on JAX; the lock makes the callback thread-safe

    def __init__(self, every: int = 100, stop_on_nan: bool = False, restore_weights: bool = False) -> None:
        super().__init__()
        every = to_python(every)
        if type(every) is not int or every < 1:
            required, fix = "an integer of at least 1", "pass a number of steps, such as every=100"
            raise unusable(ValueError, "GradientLogger", "every", required=required, got=every, fix=fix)
        if restore_weights and not stop_on_nan:
            required, fix = "False without stop_on_nan=True", "pass stop_on_nan=True"
            name = "restore_weights"
            raise unusable(ValueError, "GradientLogger", name, required=required, got=True, fix=fix)
        self.every, self.stop_on_nan, self.restore_weights = every, stop_on_nan, restore_weights
        self.diagnosis: str | None = None
        """A line about the first NaN or Inf, None if there was none."""
        self._lock = threading.Lock()
        self._records: list[GradientRecord] = []
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._unlogged: dict[int, int] = {}  # recorded steps without entries in the logs, by first batch
        # On JAX, `self.model` synchronizes the state, which breaks a step that runs.
        self._target: Any = None
        self._plain: Callable[..., Any] | None = None
        self._training: Training | None = None
        self._followers: list[GradientLogger] = []  # the other loggers that record the next step
        self._epoch_start = self._next = self._step = self._batch = 0
        self._good_state: Any = None

    @property
    def records(self) -> list[GradientRecord]:
        """A `GradientRecord` for each recorded step, in order."""
        with self._lock:
            while self._pending:
                step, entry = self._pending[0]
                self._records.append(read(step, keras.tree.map_structure(keras.ops.convert_to_numpy, entry)))
                self._pending.pop(0)
            return list(self._records)

    def table(self, step: int | None = None) -> str:
        """Return the statistics of a step as text, with a row for each layer and for each weight.

        Arguments:
            step: the number of a recorded step. The default is the last one.

        Raises:
            ValueError: if this step was not recorded.
        """
        records = self.records
        chosen = records[-1:] if step is None else [record for record in records if record.step == step]
        if not chosen:
            problem = "there is no record of this step"
            fix = "pass the logger to `fit` first, or omit the argument"
            recorded = ", ".join(str(record.step) for record in records[-5:])
            required = "a recorded step" + (f", such as {recorded}" if recorded else "")
            got = "no records" if step is None else str(step)
            raise ValueError(message("GradientLogger.table", problem, required=required, got=got, fix=fix))
        return format_record(chosen[0])

    def plot(self, of: str = "upstream", statistic: str = "norm") -> "Figure":
        """Draw a heat map of one statistic, with a row for each layer or weight and a column for each step.

        Norms and largest values have a logarithmic scale. A dot marks zero, and a red cross marks a tensor
        with NaN or Inf.

        Arguments:
            of: `"outputs"` or `"upstream"` for the outputs of layers and the gradients at them, `"weights"`
                or `"gradients"` for the weights and their gradients.
            statistic: `"norm"`, `"largest"`, `"zeros"`, `"nans"` or `"infinities"`.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if an argument is not known, or if there is nothing to draw.
        """
        from multigrad.callbacks.heat_map import draw  # matplotlib is an optional dependency

        return draw(self.records, of, statistic)

    def set_model(self, model: Any) -> None:
        """Keep a reference to the model. Keras calls this method."""
        if self._target is not None and model is not self._target:
            same = model.name == self._target.name
            logger = f"GradientLogger(every={self.every})"
            raise _not_recordable(
                f"{logger} has recorded another model, and a logger records one model",
                f"the model object {self._target.name!r} of the first `fit`",
                f"the model {model.name!r}" + ", another object of this name, such as a clone" * same,
                f"pass a new {logger} to the `fit` of each model",
            )
        super().set_model(model)
        self._target = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the training function with taps, unless there is one. Keras calls this method."""
        model = self._target
        _check(model)
        # If another callback raised after `on_train_batch_begin`, the model still has the function with taps.
        owner = getattr(model.train_function, "__self__", None)
        if isinstance(owner, GradientLogger):
            model.train_function = owner._plain
        self._followers.clear()
        self._good_state = self.diagnosis = None
        self._epoch_start = self._next
        self._prepare(model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count the steps of the last epoch. Keras calls this method."""
        self._epoch_start = self._next

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Swap the training function, if this step is to be recorded. Keras calls this method."""
        model = self._target
        step, count = self._epoch_start + batch, model.steps_per_execution
        steps = (self.params or {}).get("steps")  # None if `fit` does not know the number of batches
        count = count if steps is None else min(count, steps - batch)
        self._next = step + count
        if -(-step // self.every) * self.every >= step + count:
            return
        self._step, self._batch = step + count - 1, batch
        owner = getattr(model.train_function, "__self__", None)
        if isinstance(owner, GradientLogger):
            owner._followers.append(self)
            return
        if model.train_function is not self._plain:  # compiled anew by another callback
            self._prepare(self.model)
        model.train_function = self._run

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the entries of a recorded step to the logs. Keras calls this method."""
        first = batch - self._target.steps_per_execution + 1
        with self._lock:
            step = self._unlogged.pop(first, None)
        if step is not None and logs is not None:
            # Keras may call this method in another thread, some steps later, after newer records.
            _add(logs, next(record for record in reversed(self.records) if record.step == step))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the entries of the last recorded step to the logs. Keras calls this method."""
        records = self.records
        if records and logs is not None:
            _add(logs, records[-1])

    def _prepare(self, model: Any) -> None:
        """Make the training function with taps for the present one."""
        if self._plain is not None and model.train_function is self._plain:
            return
        self._plain = model.train_function
        training = training_of(model)
        own = "train_step" not in vars(model) and type(model).train_step is keras.Model.train_step

        def step(*args: Any) -> Any:
            with setting(TAPS, Taps(model, has_layers=own)):
                return training.step(*args)

        self._training, self._tapped = training, training.function(step)

    def _run(self, *args: Any) -> Any:
        """Run a step that is recorded, as `fit` calls its training function."""
        training = self._training
        assert training is not None
        # First, so that nothing is left if the step raises.
        self._target.train_function, loggers, self._followers = self._plain, [self, *self._followers], []
        state = training.state(args) if any(logger.restore_weights for logger in loggers) else None
        with hooking_layers:
            entry, result = training.run(self._tapped, args)
        for logger in loggers:
            result = logger._store(training, entry, result, state)
        return result

    def _store(self, training: Training, entry: dict[str, Any], result: Any, state: Any) -> Any:
        """Add the entry of a step to the records, and return the result of the step."""
        with self._lock:
            self._pending.append((self._step, entry))
            self._unlogged[self._batch] = self._step
        return self._stop_on_nan(training, result, state) if self.stop_on_nan else result

    def _stop_on_nan(self, training: Training, result: Any, state: Any) -> Any:
        """Return the result of a step, or restore the state from before it, if it has NaN or Inf."""
        record = self.records[-1]
        handles_overflow = isinstance(self._target.optimizer, keras.optimizers.LossScaleOptimizer)
        if self.restore_weights and all(statistics.is_finite for statistics in record.weights.values()):
            self._good_state = state
        self.diagnosis = diagnose(record, handles_overflow)
        if self.diagnosis is None:
            return result
        print(f"GradientLogger stops training. {self.diagnosis}")  # as keras.callbacks.TerminateOnNaN does
        self._target.stop_training = True
        return result if self._good_state is None else training.with_state(result, self._good_state)


def _add(logs: Any, record: GradientRecord) -> None:
    logs["gradient_norm"] = record.gradient_norm
    logs["gradient_not_finite"] = record.gradient_not_finite


def _check(model: Any) -> None:
    """Raise an error for a model whose steps cannot be recorded."""
    if keras.config.is_nnx_enabled():
        raise _not_recordable(
            "models of Flax NNX cannot be recorded, because Keras compiles the `train_step` of their class",
            "a model without NNX",
            "keras.config.is_nnx_enabled() is True",
            "set the environment variable KERAS_NNX_ENABLED to false",
        )
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        fix = "call model.compile(optimizer, loss)"
        raise _not_recordable("the model is not compiled", "an optimizer of Keras", describe(optimizer), fix)


def _not_recordable(problem: str, required: str, got: str, fix: str) -> ValueError:
    return ValueError(message("GradientLogger", problem, required=required, got=got, fix=fix))
