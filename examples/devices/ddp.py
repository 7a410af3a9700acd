"""Train a Keras model with an op in two processes with PyTorch's `DistributedDataParallel`.

    python examples/devices/ddp.py

Two processes on the CPU stand for two GPUs. The factor in the rule is wrong on purpose: a process that
ignored the rule would train other weights.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes run on this machine

import functools
import tempfile

import keras
import numpy as np
import torch
from keras import ops
from torch.nn.parallel import DistributedDataParallel

from multigrad import op_custom_gradient, value_and_grad
from multigrad.ops import clip_gradient

STEPS, BATCH, PROCESSES = 10, 16, 2
x = np.random.default_rng(0).normal(size=(STEPS, BATCH, 4)).astype("float32")
y = np.sin(x.sum(axis=2, keepdims=True))


def plain(x):
    return ops.tanh(x)


@op_custom_gradient
def tripled(x):
    y = ops.tanh(x)
    return y, lambda upstream: 3.0 * upstream * (1.0 - y * y)


def clipped(x, norm, axis=None):
    """By default, the norm of the gradient is that of all rows that the rule gets."""
    return clip_gradient(ops.tanh(x), norm=norm, axis=axis)


def model_of(activation):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation=activation), keras.layers.Dense(1)]
    )


def train(activation, rank, processes):
    """Train with `backward`, and return the weights."""
    model = model_of(activation)
    parallel = DistributedDataParallel(model) if processes > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch, target in zip(x, y, strict=True):
        inputs, wanted = (torch.tensor(array[rank::processes]) for array in (batch, target))
        optimizer.zero_grad()
        ((parallel(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    return model.get_weights()


def loop(activation, rank, processes, averaged):
    """Train with a loop of `value_and_grad`, and return the weights."""
    model, optimizer = model_of(activation), keras.optimizers.SGD(0.05)
    weights = model.trainable_variables
    step = value_and_grad(lambda x, y: ops.mean((model(x) - y) ** 2), variables=weights)
    for batch, target in zip(x, y, strict=True):
        _, gradients = step(batch[rank::processes], target[rank::processes])
        if averaged:  # as `DistributedDataParallel` does in `backward`, and not in other gradient functions
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
                gradient /= processes
        optimizer.apply(gradients, weights)
    return model.get_weights()


def run(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    whole, rows = functools.partial(clipped, norm=0.01), functools.partial(clipped, norm=0.01, axis=-1)
    # The loss is the mean over the rows of a process, so its gradient for a row is larger.
    larger = functools.partial(clipped, norm=0.01 * PROCESSES, axis=-1)
    alone, alone_whole, alone_rows = (train(activation, 0, 1) for activation in (tripled, whole, rows))
    results = {
        "backward": (train(tripled, rank, PROCESSES), alone),
        "a loop of value_and_grad and all_reduce": (loop(tripled, rank, PROCESSES, True), alone),
        "without all_reduce": (loop(tripled, rank, PROCESSES, False), alone),
        "without the rule": (train(plain, rank, PROCESSES), alone),
        "a rule that computes a norm over the batch": (train(whole, rank, PROCESSES), alone_whole),
        "a norm for each row": (train(rows, rank, PROCESSES), alone_rows),
        "with a larger limit": (train(larger, rank, PROCESSES), alone_rows),
    }
    if rank == 0:
        print(f"DistributedDataParallel in {PROCESSES} processes, compared with one process:")
        for name, (weights, others) in results.items():
            difference = max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))
            print(f"{name}: the weights differ by {difference:.0e}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # PyTorch 2.13 sometimes aborts at exit while a thread of gloo runs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), nprocs=PROCESSES)
