"""Defines the ways to run a step, and runs a model in a pipe in these ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipert.check.models import Loss, Model
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
    loss_fn: Loss

    def step(self, way: Way, outputs: bool = False) -> tuple[Tensor, Tensor | None]:
        """Runs forward and backward; returns the loss and, on request, outputs, without a graph."""
        self.pipe.checkpoint = way.checkpoint
        if way.schedule == CALL:
            return step(self.pipe, self.x, self.target, self.loss_fn)
        found = self.pipe.forward_backward(
            self.x, target=self.target, loss_fn=self.loss_fn, schedule=way.schedule,
            return_outputs=outputs,
        )  # fmt: skip
        return found if outputs else (found, None)

    def results(self, way: Way) -> Results:
        """Clears all gradients and runs a step; returns its output, its loss and all gradients."""
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

    @property
    def differ(self) -> bool:
        """Whether each partition has its own device; every CPU worker counts as a device."""
        return self.partitions.count(torch.device("cpu")) + len(self.gpus) == self.n

    def synchronize(self) -> None:
        """Waits until all GPUs are idle."""
        for device in self.gpus:
            torch.cuda.synchronize(device)

    def pipe(self, layers: nn.Sequential, chunks: int) -> Pipe:
        """Makes a pipe on these devices, whose partitions' sizes differ by at most one layer."""
        balance = even(len(layers), self.n)
        return Pipe(layers, balance, devices=self.partitions, chunks=chunks, timeout=TIMEOUT)

    @contextlib.contextmanager
    def trial(self, model: Model) -> Iterator[Trial]:
        """Puts ``model`` into a pipe on these devices."""
        x = leaf(model.x, self.partitions[0])
        with self.pipe(model.layers, model.chunks) as pipe:
            yield Trial(pipe, x, model.target.to(self.partitions[-1]), model.loss_fn)


def even(layers: int, n: int) -> list[int]:
    """Divides ``layers`` into ``n`` parts whose sizes differ by at most one."""
    return [layers // n + (j < layers % n) for j in range(n)]


def leaf(x: Tensor, device: torch.device) -> Tensor:
    """Copies an input to ``device`` as a leaf that requires grad if it can."""
    return x.to(device, copy=True).requires_grad_(x.is_floating_point())


def step(module: nn.Module, x: Tensor, target: Tensor, loss_fn: Loss) -> tuple[Tensor, Tensor]:
    """Runs forward and ``loss.backward()``; returns loss and output, detached."""
    output = module(x)
    loss = loss_fn(output, target)
    torch.autograd.backward(loss)
    return loss.detach(), output.detach()


def gradients(module: nn.Module, x: Tensor) -> Results:
    """Returns the gradient of each parameter, and of the input."""
    found: Results = {f"the gradient of {k}": p.grad for k, p in module.named_parameters()}
    return {**found, "the gradient of the input": x.grad}
