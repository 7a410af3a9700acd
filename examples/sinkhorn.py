"""Optimal transport as a fixed point. Its gradient is the transport plan.

    KERAS_BACKEND=jax python examples/sinkhorn.py

The minimal cost of moving one cloud of points to another is a smooth function of the costs if the entropy of
the plan is part of the cost (Cuturi, 2013, https://arxiv.org/abs/1306.0895). Sinkhorn's iteration computes it
from a potential for each point. The gradient needs only the final potentials and none of the iterations. By
the envelope theorem, the gradient with respect to the costs is the plan (Peyré and Cuturi, 2019,
https://arxiv.org/abs/1803.00567).
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
    """Return the next potentials of the rows and of the columns. All points have the same weight."""
    _, v = potentials
    rows, columns = costs.shape
    log_u = ops.logsumexp((v - costs) / ENTROPY, axis=1) + math.log(rows)
    log_v = ops.logsumexp((-ENTROPY * log_u[:, None] - costs) / ENTROPY, axis=0) + math.log(columns)
    shift = ops.mean(log_v)  # fixes the constant that may be added to one and subtracted from the other
    return -ENTROPY * (log_u + shift), -ENTROPY * (log_v - shift)


def solve(costs):
    """Return the potentials of the rows and of the columns."""
    rows, columns = costs.shape
    return fixed_point(sinkhorn, (ops.zeros(rows), ops.zeros(columns)), costs, tolerance=1e-4)


def transport(costs):
    """Return the cost minus the entropy. It depends on `costs` through the potentials only."""
    u, v = solve(costs)
    return ops.mean(u) + ops.mean(v)


def transport_plan(costs):
    """Return how much is moved from each row to each column."""
    u, v = solve(costs)
    return ops.exp((u[:, None] + v - costs) / ENTROPY)


def squared_distances(points, target):
    """Return half of the squared distances, the costs in this example."""
    return 0.5 * ops.sum((points[:, None] - target) ** 2, axis=-1)


# Points around the origin, which are moved into a ring.
points = np.random.default_rng(0).normal(0.0, 0.2, (24, 2)).astype("float32")
angles = np.linspace(0.0, 2.0 * np.pi, 32, endpoint=False)
ring = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
points, ring = ops.convert_to_tensor(points), ops.convert_to_tensor(ring)

costs = squared_distances(points, ring)
plan, gradient = ops.convert_to_numpy(transport_plan(costs)), ops.convert_to_numpy(grad(transport)(costs))
print(f"transport on {keras.backend.backend()}")
print(
    f"largest number in the plan: {plan.max():.5f}; the gradient differs by {abs(gradient - plan).max():.0e}"
)

# A step of length 1 moves each point to the mean of its targets in the plan. These steps have length 0.5.
table = Table("step", "cost minus entropy", "distance from the origin")
move = value_and_grad(lambda points: transport(squared_distances(points, ring)))
for step in range(6):
    cost, gradient = move(points)
    radius = np.linalg.norm(ops.convert_to_numpy(points), axis=1)
    table.add_row(f"{step}", f"{float(cost):.3f}", f"{radius.min():.2f} to {radius.max():.2f}")
    points = points - 0.5 * len(points) * gradient
Console(width=80).print(table)
