"""Tests a backward in several pieces, by the clock of a simulated GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.observe.event import BACKWARD, RECOMPUTE
from tests import simulated_gpus

pytestmark = pytest.mark.cuda

TOOK = 1000.0  # us


@pytest.fixture(autouse=True)
def rates() -> Iterator[None]:
    """Kernels take no time, but for those that are told how long to take."""
    gpus = simulated_gpus.running()
    if gpus is None:
        pytest.skip("asks the simulation for its virtual time")
    gpus.rates(launch_us=0.0, memory_gbps=1e9, link_gbps=1.0, tflops=1e9)
    yield
    gpus.rates(launch_us=5.0, memory_gbps=1000.0, link_gbps=25.0, tflops=20.0)


def compute() -> None:
    sleep_for_cycles: Any = torch.cuda._sleep
    sleep_for_cycles(int(2000 * TOOK))


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        compute()
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        compute()
        (again,) = ctx.saved_tensors
        compute()
        dx: Tensor = grads[0] + x - again
        return dx


class ReadsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.register_hook(lambda dy: dy)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ReadsTwice.apply(x + self.weight)  # type: ignore[no-untyped-call]
        return y


def test_a_recomputation_on_the_spot_parts_a_backward_by_the_device_s_clock() -> None:
    """A tensor read a second time is recomputed a second time, in the middle of the backward.

    Where a custom function is behind a weight with a hook, the graph of the forward stays.
    """
    module = nn.Sequential(ReadsTwice(), ReadsTwice())
    with Pipe(module, [1, 1], devices=["cuda:0"] * 2, chunks=1, checkpoint="always") as pipe:
        with pipe.record() as timeline:
            pipe(torch.ones(4, 4, device="cuda:0", requires_grad=True)).sum().backward()
    found = [e for e in timeline.events if e.kind in (BACKWARD, RECOMPUTE)]
    assert [(e.kind, e.partition) for e in found] == [
        (kind, j) for j in (1, 0) for kind in (RECOMPUTE, BACKWARD) * 2
    ]
    began = found[0].start
    times = [(round(1e6 * (e.start - began)), round(1e6 * (e.end - began))) for e in found]
    assert times == [(k * TOOK, (k + 1) * TOOK) for k in range(8)]
