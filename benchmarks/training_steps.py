"""Training steps that take gradients inside of gradients or of an equation, in eager code and compiled.

`python -m benchmarks.training_steps` prints a table for the active backend.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from multigrad import grad, jit, op_custom_gradient, value_and_grad
from multigrad.ops import implicit_root

from .measure import time_in_turns

Step = Callable[[], Any]
Program = Callable[[int], tuple[Callable[[], Any], list[keras.Variable]]]
"""A function of the width of its layers that returns a loss without arguments, and the weights."""


@op_custom_gradient
def doubled(x: Any) -> Any:
    """Return the sine of `x`, with twice its derivative, which plain code does not have."""
    return ops.sin(x), lambda upstream: 2.0 * upstream * ops.cos(x)


def _network(inputs: int, width: int, seed: int) -> keras.Model:
    initializer = keras.initializers.RandomNormal(stddev=0.3, seed=seed)
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(width, "tanh", kernel_initializer=initializer),
            keras.layers.Dense(width, doubled, kernel_initializer=initializer),
            keras.layers.Dense(1, kernel_initializer=initializer),
        ]
    )


def _points(rows: int, columns: int) -> Any:
    values = np.random.default_rng(0).uniform(0.2, 1.5, (rows, columns))
    return ops.convert_to_tensor(values.astype("float32"))


def pinn(width: int) -> tuple[Callable[[], Any], list[keras.Variable]]:
    """A physics-informed network, whose loss has the second derivative with respect to the input."""
    network, x = _network(1, width, 1), _points(4 * width, 1)
    second = grad(lambda x: ops.sum(grad(lambda x: ops.sum(network(x)))(x)))
    return lambda: ops.mean((second(x) + ops.sin(x)) ** 2), network.trainable_variables


def gradient_penalty(width: int) -> tuple[Callable[[], Any], list[keras.Variable]]:
    """A critic of a WGAN, whose loss has the norm of its gradient with respect to the input."""
    critic, real, fake = _network(8, width, 2), _points(2 * width, 8), _points(2 * width, 8) ** 2
    slope = grad(lambda x: ops.sum(critic(x)))

    def loss() -> Any:
        norm = ops.sqrt(ops.sum(slope(0.5 * real + 0.5 * fake) ** 2, axis=1) + 1e-12)
        return ops.mean(critic(fake) - critic(real)) + 10.0 * ops.mean((norm - 1.0) ** 2)

    return loss, critic.trainable_variables


def force_matching(width: int) -> tuple[Callable[[], Any], list[keras.Variable]]:
    """A potential that is trained on energies and on forces, its gradient."""
    potential, x = _network(6, width, 3), _points(2 * width, 6)
    energy_and_force = value_and_grad(lambda x: ops.sum(potential(x)))

    def loss() -> Any:
        energy, force = energy_and_force(x)
        return energy**2 / len(x) + ops.mean((force + ops.cos(x)) ** 2)

    return loss, potential.trainable_variables


def implicit_layer(width: int) -> tuple[Callable[[], Any], list[keras.Variable]]:
    """A network whose output is the root of an equation, which Newton's method solves."""
    network, x = _network(3, width, 4), _points(width, 3)

    def loss() -> Any:
        a = network(x)
        root = implicit_root(lambda z, a: z**3 + z - a, 0.5 * ops.ones_like(a), a)
        return ops.mean((root - 0.3) ** 2)

    return loss, network.trainable_variables


PROGRAMS: dict[str, Program] = {
    "PINN": pinn,
    "gradient penalty": gradient_penalty,
    "force matching": force_matching,
    "implicit layer": implicit_layer,
}


def training_step(program: Program, width: int) -> tuple[Step, list[keras.Variable]]:
    """Return a step of Adam for a program, and the weights that it changes."""
    loss, weights = program(width)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)
    gradients = value_and_grad(loss, variables=weights)

    def step() -> Any:
        value, slopes = gradients()
        optimizer.apply(slopes, weights)
        return value

    return step, weights


def main() -> None:
    """Print the times of each program."""
    print("| step | eager code, ms | `multigrad.jit`, ms |")
    print("|---|---|---|")
    for name, program in PROGRAMS.items():
        ways = {"eager": training_step(program, 32)[0], "jit": jit(training_step(program, 32)[0])}
        timings = time_in_turns(ways, rounds=30)
        print(f"| {name} | {timings['eager'].median / 1e3:.2f} | {timings['jit'].median / 1e3:.2f} |")


if __name__ == "__main__":
    main()
