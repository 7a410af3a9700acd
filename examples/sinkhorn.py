"""Optimal transport as a fixed point. Its gradient is the transport plan.

    KERAS_BACKEND=jax python examples/sinkhorn.py

The least that it costs to carry one cloud of points to another is a smooth function where the plan must have
some entropy (Cuturi, 2013, https://arxiv.org/abs/1306.0895). Sinkhorn's iteration finds it, by a potential of
each point. The gradient needs the potentials that it ends at, and none of the iterations. By the envelope
theorem, that by the costs is the plan itself (Peyré and Cuturi, 2019, https://arxiv.org/abs/1803.00567).
"""

import math

import keras
import numpy as np
from keras import ops
from rich.console import Console
from rich.table import Table

from multigrad import grad, value_and_grad
from multigrad.ops import fixed_point

ENTROPY = 0.05


def sinkhorn(potentials, costs):
    """The next potentials of the rows and of the columns, between which all have the same weight."""
    _, of_columns = potentials
    rows, columns = costs.shape
    of_rows = ops.logsumexp((of_columns - costs) / ENTROPY, axis=1) + math.log(rows)
    of_columns = ops.logsumexp((-ENTROPY * of_rows[:, None] - costs) / ENTROPY, axis=0) + math.log(columns)
    shift = ops.mean(of_columns)  # a constant may move between them, and is not to wander
    return -ENTROPY * (of_rows + shift), -ENTROPY * (of_columns - shift)


def potentials_of(costs):
    rows, columns = costs.shape
    return fixed_point(sinkhorn, (ops.zeros(rows), ops.zeros(columns)), costs, tolerance=1e-4)


def transport(costs):
    """The cost, less the entropy, from the potentials alone: all of its gradient is through them."""
    of_rows, of_columns = potentials_of(costs)
    return ops.mean(of_rows) + ops.mean(of_columns)


def plan_of(costs):
    """How much goes from each row to each column."""
    of_rows, of_columns = potentials_of(costs)
    return ops.exp((of_rows[:, None] + of_columns - costs) / ENTROPY)


def costs_of(points, target):
    """Half of the squared distances."""
    return 0.5 * ops.sum((points[:, None] - target) ** 2, axis=-1)


# A cloud around the origin, which is to become a ring.
points = np.random.default_rng(0).normal(0.0, 0.2, (24, 2)).astype("float32")
angles = np.linspace(0.0, 2.0 * np.pi, 32, endpoint=False)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
points, ring = ops.convert_to_tensor(points), ops.convert_to_tensor(ring)

costs = costs_of(points, ring)
plan, gradient = ops.convert_to_numpy(plan_of(costs)), ops.convert_to_numpy(grad(transport)(costs))
print(f"transport on {keras.backend.backend()}")
print(
    f"largest number in the plan: {plan.max():.5f}; the gradient differs by {abs(gradient - plan).max():.0e}"
)

# A step of one would bring each point to the mean of where the plan sends it. These are half as long.
table = Table("step", "cost less entropy", "distance from the origin")
move = value_and_grad(lambda points: transport(costs_of(points, ring)))
for step in range(6):
    cost, gradient = move(points)
    radius = np.linalg.norm(ops.convert_to_numpy(points), axis=1)
    table.add_row(f"{step}", f"{float(cost):.3f}", f"{radius.min():.2f} to {radius.max():.2f}")
    points = points - 0.5 * len(points) * gradient
Console(width=80).print(table)
