"""The time that `GradientLogger` adds to `fit`.

    KERAS_BACKEND=jax python -m benchmarks.gradient_logger

For each model, `fit` runs without a logger, with one that records each 100th step, and with one that records
each step. The functions are compiled before the measurement. The column `implied` is a hundredth of the time
that recording each step adds. Noise affects this number less than the column `measured`. All times are
processor times of the process, or wall-clock times with `--wall`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from multigrad.callbacks import GradientLogger

EVERY = 100


def _dense() -> tuple[keras.Model, np.ndarray]:
    chain = [layers.Dense(256, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((64,)), *chain, layers.Dense(1)]), np.ones((128, 64), "float32")


def _small() -> tuple[keras.Model, np.ndarray]:
    chain = [layers.Dense(16, activation="relu"), layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *chain]), np.ones((32, 8), "float32")


def _convolutions() -> tuple[keras.Model, np.ndarray]:
    chain: list[keras.Layer] = []
    for filters in (16, 32):
        chain += [layers.Conv2D(filters, 3), layers.BatchNormalization(), layers.ReLU()]
    chain += [layers.GlobalAveragePooling2D(), layers.Dense(1)]
    return keras.Sequential([keras.Input((16, 16, 3)), *chain]), np.ones((32, 16, 16, 3), "float32")


def _attention() -> tuple[keras.Model, np.ndarray]:
    inputs = x = keras.Input((32, 64))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="gelu")(x)))
    outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), np.ones((16, 32, 64), "float32")


MODELS: dict[str, Callable[[], tuple[keras.Model, np.ndarray]]] = {
    "2 dense layers of 16": _small,
    "5 dense layers of 256": _dense,
    "2 convolutions": _convolutions,
    "2 blocks of attention": _attention,
}


def measure(
    model: keras.Model, batch: np.ndarray, steps: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the median time of a step in milliseconds: without a logger, and with each of them."""
    # The random numbers are those of one batch. The time of a step does not depend on them.
    rng = np.random.default_rng(0)
    x = np.tile(rng.normal(size=batch.shape).astype("float32"), (steps, *[1] * (batch.ndim - 1)))
    y = np.zeros((len(x), 1), "float32")
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    loggers = {"without": [], "each 100th": [GradientLogger(EVERY)], "each": [GradientLogger(1)]}
    times: dict[str, list[float]] = {name: [] for name in loggers}
    for turn in range(rounds + 1):
        for name, callbacks in loggers.items():
            start = clock()
            model.fit(x, y, batch_size=len(batch), shuffle=False, verbose=0, callbacks=callbacks)
            if turn:  # the first turn compiles
                times[name].append(1e3 * (clock() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print a table for the active backend."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_logger", description=__doc__)
    parser.add_argument("--steps", type=int, default=2 * EVERY, help="the number of steps of a fit")
    parser.add_argument("--rounds", type=int, default=5, help="the number of timings of each fit")
    parser.add_argument("--wall", action="store_true", help="measure wall-clock time")
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    print(f"Keras {keras.__version__} on {keras.backend.backend()}, milliseconds per step\n")
    print("| model | without | each 100th | each | measured | implied |")
    print("|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        times = measure(*make(), options.steps, options.rounds, clock)
        plain, logged, each = times.values()
        measured, implied = logged / plain - 1.0, (each / plain - 1.0) / EVERY
        row = f"{plain:.3f} | {logged:.3f} | {each:.3f} | {measured:+.1%} | {implied:+.1%}"
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
