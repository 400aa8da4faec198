"""Memory of a device: what counts, and what happens when it runs out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.simulated_gpus.simulation import Simulation

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda:5")  # nothing else is there
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def _no_limit_left(gpus: Simulation) -> Iterator[None]:
    limit = gpus.memory(5)["limit"]
    yield
    gpus.limit_memory(5, limit)
    gpus.fail_allocation(5, 0)


def megabytes(count: int) -> torch.Tensor:
    return torch.empty(count * MEGABYTE, dtype=torch.uint8, device=DEVICE)


def test_live_and_peak_bytes_are_counted(gpus: Simulation) -> None:
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    x = megabytes(3)
    view = x[5:]
    del x
    assert torch.cuda.memory_allocated(DEVICE) - before == 3 * MEGABYTE
    del view
    assert torch.cuda.memory_allocated(DEVICE) == before == gpus.live_bytes(5)
    assert torch.cuda.max_memory_allocated(DEVICE) - before == 3 * MEGABYTE
    torch.cuda.reset_peak_memory_stats(DEVICE)
    assert torch.cuda.max_memory_allocated(DEVICE) == before


def test_an_allocation_over_the_limit_is_refused_as_on_a_gpu(gpus: Simulation) -> None:
    gpus.limit_memory(5, gpus.live_bytes(5) + 4 * MEGABYTE)
    assert torch.cuda.mem_get_info(DEVICE)[0] == 4 * MEGABYTE
    x = megabytes(3)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        megabytes(2)
    with pytest.raises(torch.OutOfMemoryError):
        x.to(torch.float32)  # a result is refused, too
    del x
    megabytes(4)
    assert torch.cuda.memory_stats(DEVICE)["num_ooms"] >= 2


def test_one_allocation_can_be_made_to_fail(gpus: Simulation) -> None:
    gpus.fail_allocation(5, 2)
    megabytes(1)
    with pytest.raises(torch.OutOfMemoryError, match="allocation 2 of device 5 was to fail"):
        megabytes(1)
    megabytes(1)
    assert gpus.allocations(5) == 3
