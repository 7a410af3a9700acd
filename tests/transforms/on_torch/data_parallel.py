"""One of several processes for `test_torch_distributed.py`: it runs every op on a share of a batch."""

import datetime
import os

import torch
from cases import CASES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from multigrad import op_custom_gradient
from multigrad.ops import host_call

BATCH = torch.linspace(-1.0, 1.5, 12).reshape(4, 3)


class Module(torch.nn.Module):
    """An op between two layers, with a weight."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.before, self.behind = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
        self.weight = torch.nn.Parameter(torch.zeros(3))
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-0.5, 0.75 + 0.1 * i, parameter.numel()).view_as(parameter))

    def forward(self, x):
        return self.behind(self.f(self.before(x), self.weight))


def replicated(module):
    return DistributedDataParallel(module)


def sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


WAYS = {"replicated": replicated, "sharded": sharded}


def gradients(module, batch):
    """Return the gradients after two steps. The second step starts from the updated weights."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        (module(batch) ** 2).mean().backward()
        optimizer.step()
    return [parameter.grad for parameter in module.parameters()]


ROWS = torch.tensor([0.5, -1.25, 1.5, 0.75])
SECOND = ["input", "intermediate", "output"]
"""The cases whose second derivative is taken, with respect to a sharded tensor."""


def second_derivative(function, x, w):
    """Return the second derivative of a function with respect to `x`, an ordinary or a distributed tensor."""

    def total(y):
        return (y.full_tensor() if hasattr(y, "full_tensor") else y).sum()

    (slope,) = torch.autograd.grad(total(function(x, w)), x, create_graph=True)
    return torch.autograd.grad(total(slope), x)[0]


def second_derivatives():
    """Return the second derivative of each op with respect to a tensor that two processes share."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(ROWS, mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(2.0 * ROWS, mesh, [Shard(0)])
    return {name: second_derivative(CASES[name].op, x, w).full_tensor() for name in SECOND}


def in_group(rank, folder, work):
    """Save the result of `work(rank)` in a process group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=100)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit
    )
    torch.save(work(rank), f"{folder}/of_{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # because PyTorch (2.13) sometimes aborts at exit, if a thread of gloo still runs


def each_way(rank):
    """Return the gradients of each op in each way, and second derivatives."""
    found = {}
    for way, distribute in WAYS.items():
        for name, case in CASES.items():
            own = gradients(distribute(Module(case.op)), BATCH[rank::2])
            found[way, name] = [g.full_tensor() if way == "sharded" else g for g in own]
    return found, second_derivatives()


@op_custom_gradient
def simulated(x, weight):
    def rule(upstream):
        def simulate(upstream):
            if torch.distributed.get_rank() == 1:
                raise ValueError("the simulator failed")
            return upstream

        return host_call(simulate, upstream, output=upstream), None

    return 1.0 * x, rule


def failing_in_host_code(rank):
    """Compute gradients with host code that fails in one of the processes."""
    return gradients(replicated(Module(simulated)), BATCH[rank::2])
