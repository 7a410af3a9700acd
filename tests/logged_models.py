"""Models for the tests of `GradientLogger`, and their tensors from plain eager code of the framework."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops
from support import array, numpy

from multigrad import grad, op_custom_gradient
from multigrad.callbacks.records import TENSORS

BATCH = 4


@op_custom_gradient
def wrong_tanh(x):
    """Return the hyperbolic tangent, with a derivative of 7 that plain differentiation does not have."""
    return ops.tanh(x), lambda upstream: 7.0 * upstream


class Case(NamedTuple):
    """A model, and what its logged numbers are compared with."""

    model: keras.Model
    calls: list[tuple[str, keras.Layer]]
    """The calls of layers, each on the output of the one before."""
    x: np.ndarray
    aliases: Mapping[str, str] = MappingProxyType({})
    """Layers whose output is that of another call."""


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(3 * BATCH, *shape)).astype("float32")


def _chain(*chain: keras.Layer, x: np.ndarray) -> Case:
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    outputs = inputs
    calls: list[tuple[str, keras.Layer]] = []
    for layer in chain:
        outputs = layer(outputs)
        count = sum(other is layer for _, other in calls) + 1
        calls.append((layer.name if count == 1 else f"{layer.name}#{count}", layer))
    return Case(keras.Model(inputs, outputs), calls, x)


def dense() -> Case:
    return _chain(layers.Dense(3, wrong_tanh, name="first"), layers.Dense(1, name="last"), x=_rows(2))


def layered() -> Case:
    """Return a model with masked words, a frozen layer, state, and a layer that is called twice."""
    both = layers.Dense(3, wrong_tanh, name="both")
    return _chain(
        layers.Embedding(5, 2, mask_zero=True, name="words"),
        layers.LSTM(2, name="memory"),
        layers.Dense(3, wrong_tanh, name="first", trainable=False),
        layers.BatchNormalization(name="norm"),
        both,
        both,
        layers.Dense(1, name="last"),
        x=np.arange(3 * BATCH * 3).reshape(-1, 3).astype("int32") % 5,
    )


class Block(layers.Layer):
    """A layer of two layers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(3, wrong_tanh, name="first"), layers.Dense(2, name="second")

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 3))

    def call(self, x):
        return self.second(self.first(x))


class Nested(keras.Model):
    """A subclassed model with layers in layers."""

    def __init__(self):
        super().__init__(name="nested")
        self.block, self.last = Block(name="block"), layers.Dense(1, name="last")

    def call(self, x):
        return self.last(self.block(x))


def nested() -> Case:
    model, x = Nested(), _rows(2)
    model(x[:1])
    block = model.block
    calls = [("block/first", block.first), ("block/second", block.second), ("last", model.last)]
    return Case(model, calls, x, {"block": "block/second"})


def half() -> Case:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense()
    finally:
        keras.config.set_dtype_policy(before)


def targets(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).sum(1, keepdims=True).astype("float32")


def eager_tensors(case: Case, x: np.ndarray, y: np.ndarray, scale: float) -> dict[str, dict[str, np.ndarray]]:
    """Return outputs, upstream gradients, weights and their gradients of a batch."""
    variables = {variable.path: variable for variable in case.model.variables}
    trainable = [variable.path for variable in case.model.trainable_variables]
    outputs: dict[str, np.ndarray] = {}

    def run(probes: Sequence[Any], values: Sequence[Any]) -> Any:
        value_of = dict(zip(trainable, values, strict=True))
        h = array(x, dtype=str(x.dtype))
        mask = None
        for (name, layer), probe in zip(case.calls, probes, strict=True):
            lists = [
                [value_of.get(v.path, v.value) for v in layer.trainable_variables],
                [v.value for v in layer.non_trainable_variables],
            ]
            options = {"training": True} if isinstance(layer, layers.BatchNormalization) else {}
            if mask is not None and isinstance(layer, layers.LSTM):
                options["mask"] = mask
            before, (h, _) = h, layer.stateless_call(*lists, h, **options)
            mask = layer.compute_mask(before) if isinstance(layer, layers.Embedding) else None
            outputs[name] = numpy(ops.stop_gradient(h))
            h = h + probe
        return scale * ops.mean(ops.square(ops.cast(h, "float32") - array(y)))

    values = [ops.convert_to_tensor(variables[path].value) for path in trainable]
    # The shapes of the outputs.
    run([0.0] * len(case.calls), values)
    probes = [ops.zeros(output.shape, str(output.dtype)) for output in outputs.values()]
    count = len(probes)
    gradients = grad(lambda ts: run(ts[:count], ts[count:]))([*probes, *values])
    gradients = [numpy(gradient).astype("float32") / scale for gradient in gradients]
    upstream = dict(zip(outputs, gradients, strict=False))
    for alias, name in case.aliases.items():
        outputs[alias], upstream[alias] = outputs[name], upstream[name]
    return {
        "outputs": dict(outputs),
        "upstream": upstream,
        "weights": {path: numpy(variables[path].value) for path in trainable},
        "gradients": dict(zip(trainable, gradients[count:], strict=True)),
    }


def fit(model, x, y, *callbacks, **options):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(x, y, callbacks=list(callbacks), **options)


def made(make, seed=3, **options):
    """Return a case with a compiled model, whose weights are the same for each call."""
    keras.utils.set_random_seed(seed)
    case = make()
    random = np.random.default_rng(0)
    for variable in case.model.trainable_variables:
        variable.assign(random.normal(size=variable.shape) * 0.5)
    optimizer = options.pop("optimizer", lambda: keras.optimizers.Adam(0.05))()
    case.model.compile(optimizer, "mse", **options)
    return case


def compare(statistics, wanted, tolerance):
    finite = wanted[np.isfinite(wanted)].astype("float64")
    assert statistics.size == wanted.size
    got = [statistics.norm, statistics.largest]
    np.testing.assert_allclose(got, [np.linalg.norm(finite), abs(finite).max()], tolerance, tolerance * 1e-2)
    fractions = [(wanted == 0).mean(), np.isnan(wanted).mean(), np.isinf(wanted).mean()]
    np.testing.assert_allclose(
        [statistics.zeros, statistics.nans, statistics.infinities], fractions, atol=1e-6
    )


def check_tensors(record, wanted, tolerance, shared=""):
    """Compare a record with `eager_tensors`. Calls of a layer share one upstream gradient in `shared`."""
    for kind in TENSORS:
        tables = dict(getattr(record, kind))
        assert sorted(tables) == sorted(wanted[kind]) or kind == shared
        for path, statistics in tables.items():
            compare(statistics, wanted[kind][path], tolerance)
