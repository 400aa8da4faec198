"""Tests several partitions on each simulated GPU: no read is too early, and time is saved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests import simulated_gpus

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.multi_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        simulated_gpus.running() is None, reason="needs four devices, those of --simulated-gpus"
    ),
]

WIDTH, ROWS = 16, 2  # of a micro-batch


def layers() -> nn.Sequential:
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(16)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def mean_square(y: Tensor, _: object = None) -> Tensor:
    return y.square().mean()


def pipe_of(d: int, v: int, m: int, checkpoint: str = "never") -> Pipe:
    """Makes a pipe of ``d`` devices with ``v`` partitions each."""
    devices = [f"cuda:{j % d}" for j in range(d * v)]
    return Pipe(layers(), [32 // (d * v)] * d * v, devices=devices, chunks=m, checkpoint=checkpoint)


def microseconds(schedule: str, v: int, m: int = 8) -> float:
    """Returns the time of the second step on four devices."""
    gpus = simulated_gpus.running()
    assert gpus is not None
    x = torch.randn(m * ROWS, WIDTH, device="cuda:0")
    with pipe_of(4, v, m) as pipe:
        pipe.forward_backward(x, loss_fn=mean_square, schedule=schedule)
        gpus.reset_time()
        pipe.forward_backward(x, loss_fn=mean_square, schedule=schedule)
        return gpus.makespan()


def test_the_bubble_shrinks_with_each_partition_that_a_device_has() -> None:
    gpus = simulated_gpus.running()
    assert gpus is not None
    gpus.rates(launch_us=0, memory_gbps=1e6, link_gbps=1e6, tflops=0.5)
    try:
        took = [microseconds("1f1b", 1), *(microseconds("interleaved", v) for v in (2, 4))]
    finally:
        gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=20)
    # m + (d - 1) / v, in units of what a device does of one micro-batch
    expected = [11 / 9.5, 11 / 8.75]
    assert [took[0] / other for other in took[1:]] == pytest.approx(expected, rel=0.01)
