"""The experiments of the demo. Each is one function, which runs on every backend.

`python examples/demo/experiments.py RESULT` writes the measurements of the active backend to a JSON file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from report import Measurements

from multigrad import grad, op_custom_gradient, value_and_grad

SEED = 0
BITS = 3
EPOCHS = 30
EPOCHS_PER_LINE = 5


@op_custom_gradient
def log1pexp(x: Any) -> Any:
    """Compute log(1 + exp(x)), with a gradient that stays finite where exp(x) overflows."""
    e = ops.exp(x)

    def rule(upstream: Any) -> Any:
        return ops.multiply(upstream, 1.0 - 1.0 / ops.add(1.0, e))

    return ops.log(1.0 + e), rule


def log1pexp_at_100() -> Measurements:
    """Return the value of log1pexp at 100, its gradient by plain autodiff, and its gradient by the rule."""
    value, gradient = value_and_grad(log1pexp)(100.0)
    plain = grad(lambda x: ops.log(1.0 + ops.exp(x)))(100.0)
    return {
        "log1pexp.value": float(value),
        "log1pexp.plain": float(plain),
        "log1pexp.rule": float(gradient),
    }


def chain_of_squares() -> Measurements:
    """Return square(square(square(2.0))), its gradient, and the numbers in each run of the rule."""
    steps: dict[str, list[float]] = {"x": [], "upstream": [], "current": [], "downstream": []}

    @op_custom_gradient
    def square(x: Any) -> Any:
        def rule(upstream: Any) -> Any:
            current = 2.0 * x
            downstream = upstream * current
            for name, tensor in zip(steps, (x, upstream, current, downstream), strict=True):
                steps[name].append(float(tensor))
            return downstream

        return ops.square(x), rule

    value, gradient = value_and_grad(lambda x: square(square(square(x))))(2.0)
    by_step = {f"chain.{name}": numbers for name, numbers in steps.items()}
    return {"chain.value": float(value), "chain.gradient": float(gradient), **by_step}


@op_custom_gradient
def quantize(x: Any, bits: int) -> Any:
    """Clip to [0, 1] and round to one of 2**bits levels, with a straight-through estimator as its gradient.

    The derivative of rounding is zero almost everywhere, so no layer before it could learn. The rule passes
    the upstream gradient through where `x` is inside the range (Bengio, Léonard, Courville, 2013,
    https://arxiv.org/abs/1308.3432).
    """
    steps = 2**bits - 1

    def rule(upstream: Any) -> Any:
        inside = ops.logical_and(x >= 0.0, x <= 1.0)
        return ops.where(inside, upstream, ops.zeros_like(upstream))

    return ops.round(ops.clip(x, 0.0, 1.0) * steps) / steps, rule


class Quantize(keras.layers.Layer):
    """A layer that quantizes activations to a number of bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def call(self, x: Any) -> Any:
        return quantize(x, self.bits)


def digits() -> Measurements:
    """Train a classifier of handwritten digits with 3-bit hidden activations, and return its results."""
    keras.utils.set_random_seed(SEED)
    (x, y), (x_test, y_test) = _load_digits()
    hidden = keras.layers.Dense(64)
    encoder = keras.Sequential([hidden, Quantize(BITS)])
    model = keras.Sequential([encoder, keras.layers.Dense(10)])
    model.build(x.shape)
    before = ops.convert_to_numpy(hidden.kernel)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    progress = keras.callbacks.LambdaCallback(on_epoch_end=_print_progress)
    model.fit(x, y, batch_size=64, epochs=EPOCHS, verbose=0, callbacks=[progress])
    accuracy = model.evaluate(x_test, y_test, batch_size=len(x_test), verbose=0, return_dict=True)["accuracy"]
    after = ops.convert_to_numpy(hidden.kernel)
    return {
        "digits.accuracy": accuracy,
        "digits.levels": len(np.unique(ops.convert_to_numpy(encoder(x_test)))),
        "digits.moved": float(np.linalg.norm(after - before) / np.linalg.norm(before)),
    }


def _load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return the 1,797 digits of scikit-learn as rows of 64 pixels in [0, 1]: four fifths to train, one to
    test.
    """
    from sklearn.datasets import load_digits  # only the demo needs scikit-learn

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    train, test = np.split(order, [len(order) * 4 // 5])
    x = images.astype("float32") / 16.0
    return (x[train], labels[train]), (x[test], labels[test])


def _print_progress(epoch: int, logs: dict[str, float]) -> None:
    if (epoch + 1) % EPOCHS_PER_LINE == 0:
        print(
            f"{keras.backend.backend()}: digits, epoch {epoch + 1} of {EPOCHS}: "
            f"loss {logs['loss']:.3f}, training accuracy {logs['accuracy']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    # The expected results are those of float32, so a different floatx in the user's keras.json is ignored.
    keras.config.set_floatx("float32")
    Path(sys.argv[1]).write_text(json.dumps(log1pexp_at_100() | chain_of_squares() | digits()))
