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


def results_of(work, folder):
    """Return the result of `work(rank)` in two processes."""
    torch.multiprocessing.spawn(data_parallel.in_group, (str(folder), work), nprocs=2)
    return [torch.load(folder / f"of_{rank}") for rank in (0, 1)]


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one_process(tmp_path):
    for found, seconds in results_of(data_parallel.each_way, tmp_path):
        assert found.keys() == {(way, name) for way in data_parallel.WAYS for name in CASES}
        for (_, name), got in found.items():
            module = data_parallel.Module(CASES[name].meant)
            close(got, data_parallel.gradients(module, data_parallel.BATCH), 1e-3)
        x = data_parallel.ROWS.clone().requires_grad_()
        for name, got in seconds.items():
            close(got, data_parallel.second_derivative(CASES[name].meant, x, 2.0 * data_parallel.ROWS), 1e-4)
        assert list(seconds) == data_parallel.SECOND


@pytest.mark.slow
def test_an_error_in_host_code_of_one_process_ends_both(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
        results_of(data_parallel.failing_in_host_code, tmp_path)
    assert "the simulator failed" in str(raised.value)
    assert "host_call of 'simulate'" in str(raised.value)
