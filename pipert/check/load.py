"""Makes a load for the devices: a chain of equal layers, and micro-batches that keep them busy.

How many rows a micro-batch needs depends on the device, so they are doubled until a task takes long
enough to outweigh the host's time, or memory or time run short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import nn
from torch.nn.functional import mse_loss

from pipert.check.models import Model, chain
from pipert.check.ways import Devices

__all__: list[str] = []

LONG_ENOUGH = 3e-3  # seconds for a forward task: the host needs some 0.3 ms for it
LONG_STEP = 2.0
LONG_FOR_HOST = 30e-3
HEADROOM = 2  # take at most half of the free memory


@dataclass(frozen=True)
class Load:
    """``n`` partitions of ``layers`` layers of ``width``; ``m`` micro-batches of ``rows``."""

    n: int
    m: int
    layers: int
    width: int
    rows: int

    @property
    def micro_batch_bytes(self) -> int:
        """The size of a float32 activation."""
        return 4 * self.rows * self.width

    def model(self, name: str = "chain", dropout: float = 0.0) -> Model:
        """Makes the chain, its input and its target, on the CPU."""
        x, target = (torch.randn(self.m * self.rows, self.width) for _ in range(2))
        layers = chain(self.n * self.layers, self.width, dropout)
        return Model(name, layers, x, target, mse_loss, self.m)

    def __str__(self) -> str:
        return (
            f"{self.n} partitions of {self.layers} x Linear({self.width}), {self.m} micro-batches "
            f"of {self.rows} rows"
        )

    def fits(self, devices: Devices) -> bool:
        """Whether one GPU has the memory for all activations of the plain module."""
        needed = self.micro_batch_bytes * self.m * (self.n * self.layers + 6)
        free = [torch.cuda.mem_get_info(device)[0] for device in devices.gpus]
        return all(HEADROOM * needed <= size for size in free)


def fitting(load: Load, devices: Devices) -> Load:
    """Halves the rows of ``load`` until it fits into memory, or has one row."""
    while not load.fits(devices) and load.rows > 1:
        load = replace(load, rows=load.rows // 2)
    return load


def busy(load: Load, devices: Devices) -> Load:
    """Doubles the rows until the slowest device is busy for ``LONG_ENOUGH``.

    Stops earlier if a step of the plain module, three times its forward, would take too long, or a
    task takes the host too long, or twice the rows would not fit.
    """
    partitions = {d: chain(load.layers, load.width).to(d) for d in devices.partitions}
    while True:
        times = [_task_times(devices, *partition, load) for partition in partitions.items()]
        seconds, on_host = map(max, zip(*times, strict=True))
        larger = replace(load, rows=2 * load.rows)
        plain_step = 3 * seconds * load.m * load.n
        is_long = seconds >= LONG_ENOUGH or plain_step >= LONG_STEP or on_host >= LONG_FOR_HOST
        if is_long or not larger.fits(devices):
            return load
        load = larger


def _task_times(
    devices: Devices, device: torch.device, layers: nn.Module, load: Load
) -> tuple[float, float]:
    """Returns the shortest of three forward tasks on ``device``, and its time on the host."""
    x = torch.randn(load.rows, load.width).to(device)
    times = []
    for _ in range(3):
        started = perf_counter()
        with torch.no_grad():
            seconds = timed(devices, lambda: layers(x))
        times.append((seconds, perf_counter() - started))
    return min(times)


def timed(devices: Devices, task: Callable[[], object]) -> float:
    """Measures the seconds that ``task`` takes from idle to idle.

    GPUs are timed by events: each device timestamps one before, while it is idle, and one after all
    work that the task queued on its current stream. If a CPU takes part, the host's clock counts.
    """
    devices.synchronize()
    if len(devices.gpus) < len(set(devices.partitions)):
        started = perf_counter()
        task()
        devices.synchronize()
        return perf_counter() - started
    before = _events(devices)
    task()
    after = _events(devices)
    devices.synchronize()
    spans: list[float] = [start.elapsed_time(end) for start, end in zip(before, after, strict=True)]
    return max(spans) / 1e3


def _events(devices: Devices) -> list[torch.cuda.Event]:
    return [
        torch.cuda.current_stream(device).record_event(
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        )
        for device in devices.gpus
    ]
