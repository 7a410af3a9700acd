"""DistributedDataParallel and FSDP2 on two processes with gloo: the gradients equal those of one process."""

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
