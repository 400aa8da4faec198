"""Defines the ways to run a step, and runs a model in a pipe in these ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert.check.models import Case
from pipert.pipe import Pipe

__all__: list[str] = []

MODES = ("never", "except_last", "always")
CALL = "loss.backward()"
SCHEDULES = (CALL, "gpipe", "1f1b")
TIMEOUT = 60.0  # seconds: a step that does not end is an error

Results = dict[str, Tensor | None]


class Way(NamedTuple):
    """A way to run a step: its schedule and checkpoint mode."""

    schedule: str
    """``'loss.backward()'``, or a schedule of ``forward_backward``."""
    checkpoint: str

    def __str__(self) -> str:
        return f"{self.schedule}, checkpoint={self.checkpoint!r}"


WAYS = tuple(Way(schedule, mode) for schedule in SCHEDULES for mode in MODES)
NEVER = tuple(way for way in WAYS if way.checkpoint == "never")


@dataclass(frozen=True)
class Trial:
    """A model in a pipe, its input on the first device and its target on the last."""

    pipe: Pipe
    x: Tensor
    """A leaf that requires grad if it can; the first partition would have less work without."""
    target: Tensor

    def step(self, way: Way, outputs: bool = False) -> tuple[Tensor, Tensor | None]:
        """Runs forward and backward; returns the loss and, on request, outputs, without a graph."""
        self.pipe.checkpoint = way.checkpoint
        if way.schedule == CALL:
            return step(self.pipe, self.x, self.target)
        found = self.pipe.forward_backward(
            self.x, target=self.target, loss_fn=mse_loss, schedule=way.schedule,
            return_outputs=outputs,
        )  # fmt: skip
        return found if outputs else (found, None)

    def results(self, way: Way) -> Results:
        """Runs a step from a seed; returns its output, its loss and all gradients."""
        torch.manual_seed(7)
        self.pipe.zero_grad()
        self.x.grad = None
        loss, output = self.step(way, outputs=True)
        return {"output": output, "loss": loss, **gradients(self.pipe, self.x)}


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

    def synchronize(self) -> None:
        """Waits until all GPUs are idle."""
        for device in self.gpus:
            torch.cuda.synchronize(device)

    def timed(self, task: Callable[[], object]) -> float:
        """Returns the seconds that ``task`` takes from idle to idle."""
        self.synchronize()
        started = perf_counter()
        task()
        self.synchronize()
        return perf_counter() - started

    @contextlib.contextmanager
    def trial(self, case: Case) -> Iterator[Trial]:
        """Puts a model into a pipe on these devices."""
        x = leaf(case.x, self.partitions[0])
        layers, n = len(case.layers), self.n
        even = [layers // n + (j < layers % n) for j in range(n)]
        pipe = Pipe(case.layers, even, devices=self.partitions, chunks=case.chunks, timeout=TIMEOUT)
        with pipe:
            yield Trial(pipe, x, case.target.to(self.partitions[-1]))


def leaf(x: Tensor, device: torch.device) -> Tensor:
    """Copies an input to ``device`` as a leaf that requires grad if it can."""
    return x.to(device, copy=True).requires_grad_(x.is_floating_point())


def step(module: nn.Module, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Runs forward and ``loss.backward()``; returns loss and output, detached."""
    output = module(x)
    loss = mse_loss(output, target)
    torch.autograd.backward(loss)
    return loss.detach(), output.detach()


def gradients(module: nn.Module, x: Tensor) -> Results:
    """Returns the gradient of each parameter, and of the input."""
    found: Results = {f"the gradient of {k}": p.grad for k, p in module.named_parameters()}
    return {**found, "the gradient of the input": x.grad}
