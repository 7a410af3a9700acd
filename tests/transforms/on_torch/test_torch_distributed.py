"""Two processes with gloo: DistributedDataParallel, FSDP2, and second derivatives of distributed tensors.

The gradients equal those of one process.
"""

import data_parallel
import pytest
import torch
from cases import CASES
from support import close

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs PyTorch with gloo",
)


def test_two_processes_have_the_gradients_of_one_process(tmp_path):
    torch.multiprocessing.spawn(data_parallel.work, (str(tmp_path),), nprocs=2)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"of_{rank}")
        assert found.keys() == {(way, name) for way in data_parallel.WAYS for name in CASES}
        for (_, name), got in found.items():
            module = data_parallel.Module(CASES[name].meant)
            close(got, data_parallel.gradients(module, data_parallel.BATCH), 1e-3)
        second = torch.load(tmp_path / f"second_of_{rank}")
        x = data_parallel.ROWS.clone().requires_grad_()
        for name, got in second.items():
            close(got, data_parallel.second_derivative(CASES[name].meant, x, 2.0 * data_parallel.ROWS), 1e-4)
        assert list(second) == data_parallel.SECOND
