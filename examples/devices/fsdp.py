"""Train a module with an op in two processes with PyTorch's `fully_shard` (FSDP).

    python examples/devices/fsdp.py

Each process stores half of each parameter. Two processes on the CPU stand for two GPUs. The factor in the
rule is wrong on purpose: a process that ignored the rule would train other weights.

The module has its own parameters. A layer of Keras keeps the parameters that it created, which `fully_shard`
replaces, so its weights do not change. The last line shows this.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both processes run on this machine

import tempfile

import keras
import numpy as np
import torch
from keras import ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from multigrad import op_custom_gradient

STEPS, BATCH, PROCESSES = 10, 16, 2
x = np.random.default_rng(0).normal(size=(STEPS, BATCH, 4)).astype("float32")
y = np.sin(x.sum(axis=2, keepdims=True))


def plain(x):
    return ops.tanh(x)


@op_custom_gradient
def tripled(x):
    y = ops.tanh(x)
    return y, lambda upstream: 3.0 * upstream * (1.0 - y * y)


class Module(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        torch.manual_seed(0)
        self.activation, self.first, self.last = activation, torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.activation(self.first(x)))


def train(model, rank, processes):
    """Train a module, sharded over the processes, and return its whole parameters."""
    if processes > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch, target in zip(x, y, strict=True):
        inputs, wanted = (torch.tensor(array[rank::processes]) for array in (batch, target))
        optimizer.zero_grad()
        ((model(inputs) - wanted) ** 2).mean().backward()
        optimizer.step()
    parameters = [parameter.detach() for parameter in model.parameters()]
    if processes > 1:
        assert 2 * parameters[0].to_local().numel() == parameters[0].numel()
        parameters = [parameter.full_tensor() for parameter in parameters]
    return [parameter.numpy() for parameter in parameters]


def change_of_a_keras_layer(rank):
    """Return how far a layer of Keras moves in training under `fully_shard`."""
    layer = keras.layers.Dense(2)
    layer.build((BATCH, 4))
    before = layer.get_weights()[0].copy()
    train(layer, rank, PROCESSES)
    return np.abs(layer.get_weights()[0] - before).max()


def run(rank, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    results = {
        "fully_shard": train(Module(tripled), rank, PROCESSES),
        "without the rule": train(Module(plain), rank, PROCESSES),
    }
    change = change_of_a_keras_layer(rank)
    if rank == 0:
        alone = train(Module(tripled), 0, 1)
        print(f"fully_shard in {PROCESSES} processes, compared with one process:")
        for name, weights in results.items():
            difference = max(np.abs(a - b).max() for a, b in zip(weights, alone, strict=True))
            print(f"{name}: the weights differ by {difference:.0e}")
        print(f"a layer of Keras under fully_shard: its weights change by {change:.0e}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # PyTorch 2.13 sometimes aborts at exit while a thread of gloo runs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), nprocs=PROCESSES)
