"""The ways to run a step, and running one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipert.check.models import Loss
from pipert.pipe import Pipe

__all__: list[str] = []

MODES = ("never", "except_last", "always")
CALL = "loss.backward()"
SCHEDULES = (CALL, "gpipe", "1f1b")
TIMEOUT = 60.0  # seconds: a step that does not end is an error


class Way(NamedTuple):
    """A way to run a step: schedule and checkpoint mode."""

    schedule: str
    """``'loss.backward()'``, or a schedule of ``forward_backward``."""
    checkpoint: str

    def __str__(self) -> str:
        return f"{self.schedule}, checkpoint={self.checkpoint!r}"


WAYS = tuple(Way(schedule, mode) for schedule in SCHEDULES for mode in MODES)


@dataclass(frozen=True)
class Devices:
    """The devices of the partitions, in order."""

    partitions: tuple[torch.device, ...]

    @property
    def n(self) -> int:
        """The number of partitions."""
        return len(self.partitions)

    @property
    def gpus(self) -> tuple[torch.device, ...]:
        """The CUDA devices, each once."""
        return tuple(dict.fromkeys(d for d in self.partitions if d.type == "cuda"))

    @property
    def differ(self) -> bool:
        """Whether each partition has its own device; every CPU worker counts as one."""
        return self.partitions.count(torch.device("cpu")) + len(self.gpus) == self.n

    def synchronize(self) -> None:
        """Wait until all GPUs are idle."""
        for device in self.gpus:
            torch.cuda.synchronize(device)

    def pipe(
        self, layers: nn.Sequential, balance: list[int], chunks: int, checkpoint: str = "never"
    ) -> Pipe:
        """Makes a pipe on these devices."""
        return Pipe(
            layers, balance, devices=self.partitions, chunks=chunks, checkpoint=checkpoint,
            timeout=TIMEOUT,
        )  # fmt: skip


def backward(loss: Tensor) -> None:
    """``loss.backward()``, which torch does not type."""
    loss.backward()  # type: ignore[no-untyped-call]


def step(
    pipe: Pipe, way: Way, x: Tensor, target: Tensor, loss_fn: Loss, outputs: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Runs forward and backward; returns the loss and, if requested, outputs, without a graph."""
    pipe.checkpoint = way.checkpoint
    if way.schedule == CALL:
        output = pipe(x)
        loss = loss_fn(output, target.to(pipe.devices[-1]))
        backward(loss)
        return loss.detach(), output.detach() if outputs else None
    found = pipe.forward_backward(
        x, target=target, loss_fn=loss_fn, schedule=way.schedule, return_outputs=outputs
    )
    return found if outputs else (found, None)
