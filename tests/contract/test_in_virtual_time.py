"""Tests what copies cost in steps on eight simulated GPUs, by the clocks of their streams.

A task of forward takes two matrix products' time and one of backward four; a copy takes a sixth of
the former. No clock of the host is read, so the figures depend on order and waits alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from tests import simulated_gpus
from tests.simulated_gpus.simulation import Simulation

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        simulated_gpus.running() is None, reason="virtual time is that of --simulated-gpus"
    ),
]

WIDTH, ROWS = 16, 2  # of a micro-batch
AUTOGRAD = "autograd"


@pytest.fixture
def gpus() -> Iterator[Simulation]:
    gpus = simulated_gpus.running()
    assert gpus is not None
    gpus.rates(launch_us=0, memory_gbps=1e6, link_gbps=192, tflops=0.5)
    yield gpus
    gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=20)


def layers(n: int) -> nn.Sequential:
    """Makes two linear layers and their activations for each of ``n`` devices."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * n)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair])


def mean_square(y: Tensor, _: object = None) -> Tensor:
    return y.square().mean()


def step(pipe: Pipe, x: Tensor, schedule: str) -> None:
    if schedule == AUTOGRAD:
        mean_square(pipe(x)).backward()  # type: ignore[no-untyped-call]
    else:
        pipe.forward_backward(x, loss_fn=mean_square, schedule=schedule)


def pipe_of(n: int, m: int, checkpoint: str = "never") -> Pipe:
    devices = [f"cuda:{j}" for j in range(n)]
    return Pipe(layers(n), [4] * n, devices=devices, chunks=m, checkpoint=checkpoint)


def microseconds(gpus: Simulation, schedule: str, n: int = 8, m: int = 32) -> float:
    """Returns the time of the second step."""
    x = torch.randn(m * ROWS, WIDTH, device="cuda:0")
    with pipe_of(n, m) as pipe:
        step(pipe, x, schedule)
        gpus.reset_time()
        step(pipe, x, schedule)
        return gpus.makespan()


def test_eager_1f1b_is_as_fast_as_fill_and_drain(gpus: Simulation) -> None:
    autograd = microseconds(gpus, AUTOGRAD)
    assert autograd / microseconds(gpus, "1f1b") < 0.97  # or the link is no slow one
    assert autograd / microseconds(gpus, "eager-1f1b") >= 0.97


def test_a_gradient_is_on_its_way_while_those_of_weights_are_added_up(gpus: Simulation) -> None:
    """Adding a task's gradients to the sums takes longer here than both ways over a link."""
    gpus.rates(launch_us=0, memory_gbps=100, link_gbps=5, tflops=1e3)
    assert microseconds(gpus, "gpipe") / microseconds(gpus, "1f1b") >= 0.97


@pytest.mark.parametrize(("schedule", "grows"), [("eager-1f1b", False), ("gpipe", True)])
def test_the_peak_of_a_device_does_not_grow_with_the_number_of_micro_batches(
    gpus: Simulation, schedule: str, grows: bool
) -> None:
    """By a micro-batch's inputs of three layers, or more; a gradient that the worker of the device
    before has not copied yet is less, and is there or not as the threads' time has it."""
    peaks = []
    for m in (8, 32):
        x = torch.randn(m * ROWS, WIDTH, device="cuda:0")
        with pipe_of(4, m) as pipe:
            step(pipe, x, schedule)
            torch.cuda.reset_peak_memory_stats(1)
            step(pipe, x, schedule)
            peaks.append(gpus.peak_bytes(1))
    kept = 3 * ROWS * WIDTH * torch.float32.itemsize
    assert (peaks[1] - peaks[0] >= kept) == grows


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_are_delivered_before_the_last_backward_has_ended(
    gpus: Simulation, checkpoint: str
) -> None:
    """The host waits for no device, or for the last recomputation, and for none behind it."""
    x = torch.randn(4 * ROWS, WIDTH, device="cuda:0")
    with pipe_of(2, 4, checkpoint) as pipe:
        step(pipe, x, "1f1b")
        gpus.reset_time()
        step(pipe, x, "1f1b")
        product = 2 * ROWS * WIDTH**2 / 0.5e6  # us; the last backward has three of them
        assert gpus.host_time() <= gpus.makespan() - 3 * product
