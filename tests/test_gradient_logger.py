"""`GradientLogger` records what plain eager code computes, and `fit` trains the same weights with it."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import keras
import logged_models
import numpy as np
import pytest
from keras import layers, ops
from logged_models import BATCH, check_tensors, compare, eager_tensors, fit, made, targets
from support import BACKEND, array, numpy

from multigrad import op_custom_gradient, value_and_grad
from multigrad.callbacks import GradientLogger
from multigrad.callbacks.records import GradientRecord, GradientStatistics, diagnose
from multigrad.callbacks.steps import training_of
from multigrad.common import keras_internals

WHERE = Path(__file__).with_name("logged_on_devices.py")


def values_of(model):
    return [numpy(variable).copy() for variable in model.variables]


def same_weights(model, wanted, tolerance=0.0):
    for variable, value in zip(model.variables, wanted, strict=True):
        np.testing.assert_allclose(numpy(variable), value, tolerance, tolerance, err_msg=variable.path)


def clipped():
    return keras.optimizers.Adam(0.05, clipnorm=1e-3, gradient_accumulation_steps=2)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=1024.0)


NOT_ON_TORCH = pytest.mark.skipif(BACKEND == "torch", reason="Keras has no such steps on PyTorch")

CASES = [
    pytest.param("dense", {}, id="dense"),
    pytest.param("layered", {}, id="layered"),
    pytest.param("nested", {}, id="nested"),
    pytest.param("half", {"optimizer": scaled}, id="float16 with a scaled loss"),
    pytest.param("dense", {"optimizer": clipped}, id="clipped and accumulated"),
    pytest.param("dense", {"jit_compile": True}, id="jit_compile", marks=pytest.mark.slow),
    pytest.param("dense", {"run_eagerly": True}, id="run_eagerly"),
    pytest.param("dense", {"steps_per_execution": 2}, id="steps_per_execution", marks=NOT_ON_TORCH),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_numbers_are_those_of_eager_code_and_the_weights_are_the_same(name, options):
    """The plain model is trained up to the batch of the last record, which eager code then computes."""
    options = {"jit_compile": BACKEND == "jax" and "run_eagerly" not in options} | options
    make, together = getattr(logged_models, name), options.get("steps_per_execution", 1) > 1
    logged, whole = made(make, **options), made(make, **options)
    # Plain steps, because the first batches are trained on their own.
    before = made(make, **options | {"steps_per_execution": 1})
    x, y = logged.x[: 3 * BATCH], targets(logged.x)
    logger = GradientLogger(every=2)
    fit(logged.model, x, y, logger)
    fit(whole.model, x, y)
    record = logger.records[0 if together else -1]
    start = record.step * BATCH
    fit(before.model, x[:start], y[:start])
    assert record.scale == (float(numpy(before.model.optimizer.dynamic_scale)) if name == "half" else 1.0)
    wanted = eager_tensors(before, x[start : start + BATCH], y[start : start + BATCH], record.scale)
    tolerance = 1e-2 if name == "half" else 1e-4
    check_tensors(record, wanted, tolerance, shared="upstream" if name == "layered" else "")
    all_gradients = np.concatenate([g.ravel() for g in wanted["gradients"].values()])
    np.testing.assert_allclose(record.gradient_norm, np.linalg.norm(all_gradients), rtol=tolerance)
    # On PyTorch, a recorded step of a compiled model runs uncompiled.
    is_rounded = BACKEND == "torch" and options["jit_compile"]
    same_weights(logged.model, values_of(whole.model), 1e-5 if is_rounded else 0.0)


# On JAX, eager code compiles each operation, which takes longer than one step.
MODE = {"run_eagerly": BACKEND != "jax", "jit_compile": BACKEND == "jax"}
QUICK = MODE | {"optimizer": lambda: keras.optimizers.SGD(0.05)}


class Reader(keras.callbacks.Callback):
    """Store the logs of batches and epochs, as TensorBoard does."""

    def __init__(self):
        super().__init__()
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def test_the_logs_have_two_more_entries():
    case, reader, logger = made(logged_models.dense, **QUICK), Reader(), GradientLogger(every=2)
    history = fit(case.model, case.x, targets(case.x), logger, reader, epochs=2)
    few = {"gradient_norm", "gradient_not_finite"}
    assert [few <= set(logs) for logs in reader.batches] == [True, False, True, False, True, False]
    assert all(set(logs) - few == {"loss"} for logs in [*reader.batches, *reader.epochs])
    norms = [record.gradient_norm for record in logger.records]
    assert [record.step for record in logger.records] == [0, 2, 4]
    assert [logs["gradient_norm"] for logs in reader.batches[::2]] == norms
    assert history.history["gradient_norm"] == norms[1:]
    assert history.history["gradient_not_finite"] == [0.0, 0.0]


class Counting(layers.Layer):
    """A layer that counts how often its code runs, which is once per trace of a compiled step."""

    runs = 0

    def call(self, x):
        self.runs += 1
        return x * 1.0


@pytest.mark.slow_on("jax", "tensorflow")
def test_a_second_fit_compiles_nothing():
    counting = Counting()
    model = keras.Sequential([keras.Input((2,)), counting, layers.Dense(1)])
    model.compile("sgd", "mse")
    logger, x = GradientLogger(every=2), np.ones((3 * BATCH, 2), "float32")
    fit(model, x, targets(x), logger)
    before, function = counting.runs, model.train_function
    fit(model, x, targets(x), logger)
    uncompiled = 3 if BACKEND == "torch" else 0
    assert counting.runs == before + uncompiled
    assert model.train_function is function
    assert [record.step for record in logger.records] == [0, 2, 4]
    model.compile("sgd", "mse")
    fit(model, x, targets(x), logger)
    assert counting.runs > before + uncompiled


@NOT_ON_TORCH
def test_a_last_execution_of_fewer_steps():
    case, logger = made(logged_models.dense, steps_per_execution=2, **QUICK), GradientLogger(every=1)
    x = case.x[: 3 * BATCH]
    fit(case.model, x, targets(x), logger, epochs=2)
    assert [record.step for record in logger.records] == [1, 2, 4, 5]


def test_two_loggers():
    """They record steps of their own and the same step."""
    alone, one, other = GradientLogger(every=2), GradientLogger(every=2), GradientLogger(every=np.int64(3))
    for loggers in ([alone], [one, other]):
        case = made(logged_models.dense, **QUICK)
        fit(case.model, case.x[: 3 * BATCH], targets(case.x)[: 3 * BATCH], *loggers, epochs=2)
    assert [record.step for record in one.records] == [0, 2, 4]
    assert [record.step for record in other.records] == [0, 3]
    assert one.records == alone.records
    assert other.records[0] == one.records[0]


def test_two_loggers_of_which_the_second_restores_the_weights():
    case = made(lambda: unstable(nan_forward, None), **QUICK)
    x, start = case.x.copy(), values_of(case.model)
    x[0] = 1e4
    loggers = GradientLogger(every=1), GradientLogger(every=1, stop_on_nan=True, restore_weights=True)
    fit(case.model, x, targets(case.x), *loggers)
    assert [logger.diagnosis is None for logger in loggers] == [True, False]
    assert [len(logger.records) for logger in loggers] == [1, 1]
    same_weights(case.model, start)


class Failing(layers.Layer):
    """A layer that raises in training if `Failing.fails` is set."""

    fails = False

    def call(self, x):
        if type(self).fails:
            raise RuntimeError("the layer fails")
        return x * 1.0


class Raising(keras.callbacks.Callback):
    """A callback that raises between `on_train_batch_begin` of the logger and the step."""

    def on_train_batch_begin(self, batch, logs=None):
        raise RuntimeError("the callback fails")


def attributes_of(model):
    names = ("train_step", "compute_loss_and_updates")
    found = [name for name in names if name in vars(model)]
    found += [name for name in ("apply", "stateless_apply", "scale_loss") if name in vars(model.optimizer)]
    return keras.Operation.__call__, found


@pytest.mark.parametrize("where", ["layer", "callback", "data"])
def test_nothing_stays_patched_after_an_error(where):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1)(Failing()(inputs)))
    model.compile("sgd", "mse", **MODE)
    x = np.ones((BATCH, 2), "float32")
    fit(model, x, targets(x))  # builds everything, so that the error is that of a step
    before = attributes_of(model)
    logger = GradientLogger(every=1)
    Failing.fails = where == "layer"
    others = [Raising()] if where == "callback" else []

    def batches():
        for _ in range(4):  # Keras reads some ahead
            yield x, targets(x)
        raise RuntimeError("the data fails")

    options = {"callbacks": [logger, *others], "shuffle": False, "verbose": 0}
    data = (batches(),) if where == "data" else (x, targets(x))
    try:
        with pytest.raises(Exception, match=f"the {where} fails"):
            model.fit(*data, **options)
    finally:
        Failing.fails = False
    assert attributes_of(model) == before
    assert bool(logger.records) == (where == "data")
    if where != "callback":  # on JAX, Keras loses the state of a model whose step raises
        return
    # After an error in another callback, the next step puts the model's function back.
    fit(model, x, targets(x), GradientLogger(every=5))
    function = model.train_function
    fit(model, x, targets(x))
    assert model.train_function is function
    assert not isinstance(getattr(function, "__self__", None), GradientLogger)


@op_custom_gradient
def nan_forward(x):
    """Return NaN for numbers above 100."""
    return ops.where(x > 100.0, x * np.nan, x), lambda upstream: upstream


@op_custom_gradient
def nan_backward(x):
    """Return `x`. The gradient of numbers above 100 is NaN."""
    return x, lambda upstream: ops.where(x > 100.0, upstream * np.nan, upstream)


def unstable(first, second):
    chain = [
        layers.Activation(first, name="one"),
        layers.Dense(2, name="two"),
        layers.BatchNormalization(name="norm"),
    ]
    chain += [layers.Activation(second, name="three"), layers.Dense(1, name="four")]
    return logged_models._chain(*chain, x=np.ones((3 * BATCH, 2), "float32"))


NAN_CASES = {
    "forward": (nan_forward, None, "Step 1, forward: NaN first appears in the output of one."),
    "backward": (
        None,
        nan_backward,
        "Step 1, backward: NaN first appears in the upstream gradient at the output of norm, in the "
        "derivative of three or of an operation between both.",
    ),
}


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize(("first", "second", "line"), NAN_CASES.values(), ids=NAN_CASES)
def test_nan_stops_training_and_is_located(first, second, line, restore, capsys):
    case, plain = [made(lambda: unstable(first, second), **QUICK) for _ in range(2)]
    x = case.x.copy()
    x[0, 0] = 2.0
    x[BATCH : 2 * BATCH] *= np.arange(2 * BATCH).reshape(BATCH, 2)
    x[BATCH, 0] = 1e4
    if second:
        x[:BATCH] = 1.0  # no variance, so the output of the normalization is zero
        for model in (case.model, plain.model):
            model.get_layer("norm").gamma.assign([1e4, 1e4])
    fit(plain.model, x[:BATCH], targets(case.x)[:BATCH])
    logger = GradientLogger(every=1, stop_on_nan=True, restore_weights=restore)
    fit(case.model, x, targets(case.x), logger)
    assert logger.diagnosis == line
    assert capsys.readouterr().out == f"GradientLogger stops training. {line}\n"
    assert [record.step for record in logger.records] == [0, 1]
    if restore:
        same_weights(case.model, values_of(plain.model))
    else:
        assert any(np.isnan(value).any() for value in values_of(case.model))


def test_the_first_nan_of_a_record():
    good = GradientStatistics(1.0, 1.0, 0.0, 0.0, 0.0, 4)
    nan, inf = replace(good, nans=0.5), replace(good, infinities=0.5)
    names = ("in", "block/a", "block/b", "block", "out")
    layer, weights = dict.fromkeys(names, good), {"w": good}

    def line(outputs=(), upstream=(), before=good, gradient=good, handled=False, scale=1.0):
        tables = layer | dict.fromkeys(outputs, inf), layer | dict.fromkeys(upstream, nan)
        record = GradientRecord(7, scale, *tables, {"w": before}, weights | {"w": gradient})
        return diagnose(record, handled)

    assert line() is None
    assert line(outputs=names, before=nan) == "Step 7: NaN is in the weight w before the step."
    forward = "Step 7, forward: Inf first appears in the output of block/b."
    assert line(outputs=names[2:], upstream=names) == forward
    first = "Step 7, backward: NaN first appears in the upstream gradient at the output of"
    between = "or of an operation between both."
    assert line(upstream=names) == f"{first} out, in the derivative of the loss."
    assert line(upstream=names[:-1]) == f"{first} block, in the derivative of out {between}"
    assert line(upstream=names[:2]) == f"{first} block/a, in the derivative of block/b {between}"
    assert line(gradient=nan) == "Step 7, backward: NaN first appears in the gradient of the weight w."
    assert line(upstream=names, gradient=nan, handled=True, scale=2.0) is None
    assert line(outputs=names, handled=True, scale=2.0) is not None
    assert line(upstream=names, handled=True) is not None


def test_weights_that_are_nan_already_are_restored_from_an_earlier_step():
    case = made(lambda: unstable(nan_forward, None), **QUICK)
    x, start = case.x.copy(), values_of(case.model)
    x[BATCH] = 1e4
    logger = GradientLogger(every=2, stop_on_nan=True, restore_weights=True)
    fit(case.model, x, targets(case.x), logger)
    assert logger.diagnosis == "Step 2: NaN is in the weight two/kernel before the step."
    same_weights(case.model, start)


def test_an_overflow_of_a_scaled_loss_does_not_stop_training():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1e38)
    case = made(logged_models.half, **QUICK | {"optimizer": lambda: optimizer})
    logger = GradientLogger(every=1, stop_on_nan=True)
    fit(case.model, case.x, targets(case.x), logger)
    assert len(logger.records) == 3
    assert logger.records[0].gradient_not_finite == 1.0
    assert logger.diagnosis is None


class OwnStep(keras.Model):
    """A model with its own `train_step`, which doubles the loss."""

    def train_step(self, *args):
        if BACKEND == "jax":
            return self._jax_step(*args)
        value, gradients = value_and_grad(
            lambda: self.loss_of(*args[0]), variables=self.trainable_variables
        )()
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": value}

    def loss_of(self, x, y):
        return 2.0 * ops.mean(ops.square(self(x, training=True) - y))

    def _jax_step(self, state, data):
        trainable, others, optimizer, metrics = state

        def loss(values):
            return 2.0 * ops.mean(ops.square(self.stateless_call(values, others, data[0])[0] - data[1]))

        value, gradients = value_and_grad(loss)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": value}, (trainable, others, optimizer, metrics)


class StepInScope(OwnStep):
    """The same, whose step on JAX runs in a `keras.StatelessScope` and calls `apply`."""

    def _jax_step(self, state, data):
        weights, optimizer = self.trainable_variables, self.optimizer
        groups = (weights, self.non_trainable_variables, optimizer.variables, self.metrics_variables)
        pairs = [zip(group, values, strict=True) for group, values in zip(groups, state, strict=True)]
        with keras.StatelessScope(itertools.chain(*pairs)) as scope:
            value, gradients = value_and_grad(lambda: self.loss_of(*data), variables=weights)()
            optimizer.apply(gradients, weights)
        return {"loss": value}, tuple([[scope.get_current_value(v) for v in group] for group in groups])


@pytest.mark.parametrize("kind", [OwnStep, StepInScope])
def test_a_custom_train_step_records_weights_alone(kind):
    def own():
        case = logged_models.dense()
        model = kind(case.model.input, case.model.output)
        return case._replace(model=model)

    case, plain = made(own, **QUICK), made(own, **QUICK)
    x, y = case.x[:BATCH], targets(case.x)[:BATCH]
    wanted = eager_tensors(plain, x, y, 2.0)  # divided by this scale
    logger = GradientLogger(every=1)
    fit(case.model, x, y, logger)
    fit(plain.model, x, y)
    (record,) = logger.records
    assert (record.outputs, record.upstream) == ({}, {})
    for path, statistics in record.gradients.items():
        compare(statistics, 2.0 * wanted["gradients"][path], 1e-4)
    same_weights(case.model, values_of(plain.model))
    assert "output of" not in logger.table()


class Mapped(layers.Wrapper):
    """A layer that calls its inner layer for each row."""

    def call(self, x):
        return ops.vectorized_map(lambda row: self.layer(row[None])[0], x)


@pytest.mark.parametrize(
    ("outer", "shape"),
    [
        (lambda: Mapped(layers.Dense(2), name="outer"), (2,)),
        (lambda: layers.RNN(layers.SimpleRNNCell(2), name="outer"), (3, 2)),
        (lambda: layers.TimeDistributed(layers.Dense(2), name="outer"), (3, 2)),
    ],
)
def test_inner_layers_of_loops_and_maps_are_skipped(outer, shape):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape), outer(), layers.Dense(1, name="last")])
    model.compile("sgd", "mse", **MODE)
    logger, x = GradientLogger(every=1), np.ones((BATCH, *shape), "float32")
    fit(model, x, np.ones((BATCH, *model.output_shape[1:]), "float32"), logger)
    assert list(logger.records[0].outputs) == list(logger.records[0].upstream) == ["outer", "last"]
    assert all(statistics.norm for statistics in logger.records[0].gradients.values())


class Masking(layers.Layer):
    """A layer that sets the mask of its output in its own code."""

    def call(self, x):
        y = x * 1.0
        keras_internals.set_mask(y, ops.arange(3)[None] + ops.zeros((BATCH, 1), "int32") < 1)
        return y


def test_a_mask_that_a_layer_sets_itself_stays():
    def make():
        chain = [layers.Dense(2, name="first"), Masking(name="mask"), layers.LSTM(2, name="memory")]
        x = np.ones((3 * BATCH, 3, 2), "float32")
        return logged_models._chain(*chain, layers.Dense(1, name="last"), x=x)

    case, plain = made(make, **QUICK), made(make, **QUICK)
    x, y = case.x[:BATCH], targets(case.x)[:BATCH]
    fit(case.model, x, y, GradientLogger(every=1))
    fit(plain.model, x, y)
    same_weights(case.model, values_of(plain.model))


@pytest.mark.parametrize("values", [[3e30, -4e30], [3e-30, -4e-30], [0.0, 0.0], [np.inf, -3.0, np.nan, 4.0]])
def test_statistics_of_extreme_numbers(values):
    from multigrad.callbacks.taps import statistics

    x = np.array(values, "float32")
    finite = x[np.isfinite(x)].astype("float64")
    counts = [(x == 0).sum(), np.isnan(x).sum(), np.isinf(x).sum(), len(x)]
    wanted = [np.linalg.norm(finite), abs(finite).max(), *counts]
    np.testing.assert_allclose(numpy(statistics(array(x))), wanted, rtol=1e-6)


def test_a_backend_without_a_training_step_raises(monkeypatch):
    case = made(lambda: logged_models._chain(layers.Dense(1), x=np.ones((BATCH, 2), "float32")), **QUICK)
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(NotImplementedError, match="tensorflow, jax, torch"):
        training_of(case.model)


@pytest.mark.usefixtures("plt")
def test_the_table_and_the_heat_map():
    case, logger = made(logged_models.dense, **QUICK), GradientLogger(every=2)
    fit(case.model, case.x, targets(case.x), logger)
    lines = logger.table().splitlines()
    assert lines[0] == "step 2"
    assert [line.split()[0] for line in lines if line.startswith(("first", "last"))] == [
        "first", "last", "first/kernel", "first/bias", "last/kernel", "last/bias",
    ]  # fmt: skip
    norm = logger.records[0].upstream["first"].norm
    assert f"{norm:.4g}" in logger.table(step=0).splitlines()[3].split()
    axes = logger.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "last"]
    np.testing.assert_allclose(axes.images[0].get_array()[0, 0], norm, rtol=1e-6)
    low, high = axes.images[0].get_clim()
    assert low <= norm <= high
    assert high >= 10.0 * low
    assert len(logger.plot(of="gradients", statistic="zeros").axes[0].get_yticklabels()) == 4


def test_models_that_cannot_be_recorded(monkeypatch):
    case, logger = made(logged_models.dense, **QUICK), GradientLogger(every=7)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse")
    logger.set_model(model)
    name = f"'{clone.name}', another object of this name, such as a clone"
    fix = r"fix: pass a new GradientLogger\(every=7\) to the `fit` of each model"
    with pytest.raises(ValueError, match=rf"GradientLogger: (.|\n)*{name}(.|\n)*{fix}"):
        fit(clone, case.x, targets(case.x), logger)
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match="models of Flax NNX cannot be recorded"):
        fit(case.model, case.x, targets(case.x), GradientLogger())


@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "torch", reason="Keras distributes no models on PyTorch")
def test_two_devices_give_the_numbers_of_one():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, WHERE], check=False, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.stdout.endswith("the same on two devices\n"), done.stdout + done.stderr
