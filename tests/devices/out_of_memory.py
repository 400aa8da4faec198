"""Makes a pipe run out of memory at any allocation.

The pipe has every kind of copy: skips, tied weights, inputs and targets on another device. Each
copy between devices is an allocation, and so is each result of F, R and B. So making each
allocation of each device fail in turn exhausts memory at every place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipert import Observer, Pipe, TaskInfo
from tests.helpers.skip_layers import popping, stashing
from tests.simulated_gpus.simulation import Simulation

__all__ = ["DEVICES", "Started", "Tight", "until"]

DEVICES = 4  # three of the pipe, and one that holds inputs and targets
PATIENCE = 300  # times 10 ms
Forward = Generator[Any, Any, Tensor]


def model() -> nn.Sequential:
    """Makes a model for three partitions; the last one uses the first one's weight and skip."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(
        first, stashing(make=lambda x: x * 2),
        nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2),
        nn.Linear(8, 8), popping(), nn.Tanh(), last,
    )  # fmt: skip


class Tight:
    """A pipe for steps in which one allocation may fail.

    Args:
        gpus: the simulated devices.
        way: ``'backward'``, or the schedule of ``forward_backward``.
        mode: the pipe's checkpointing mode.
    """

    def __init__(self, gpus: Simulation, way: str, mode: str) -> None:
        self.gpus, self.way = gpus, way
        torch.manual_seed(1)
        self.x = torch.randn(6, 8, device="cuda:3").requires_grad_()
        self.target = torch.randn(6, 8, device="cuda:3")
        devices = [f"cuda:{j}" for j in range(3)]
        self.pipe = Pipe(model(), [2, 3, 4], devices=devices, chunks=3, checkpoint=mode)
        self.right = self.results()  # also allocates what is allocated only once
        self.bytes = self.live()

    def step(self) -> Tensor:
        """Runs a step, with the same random numbers each time; returns its loss."""
        torch.manual_seed(3)
        if self.way != "backward":
            loss: Tensor = self.pipe.forward_backward(
                self.x, target=self.target, loss_fn=functional.mse_loss, schedule=self.way
            )
            return loss
        loss = functional.mse_loss(self.pipe(self.x), self.target.to("cuda:2"))
        torch.autograd.backward(loss)
        return loss.detach()

    def results(self) -> list[Tensor]:
        """Returns loss and gradients of a step, on the CPU; leaves none on the devices."""
        loss = self.step()
        found = [loss.cpu(), *(grad.cpu() for grad in self.grads())]
        self.zero()
        return found

    def grads(self) -> list[Tensor]:
        """Returns all gradients that exist."""
        tensors = [self.x, *self.pipe.parameters()]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def zero(self) -> None:
        self.x.grad = None
        self.pipe.zero_grad()

    def live(self) -> list[int]:
        """Returns the live bytes of each device."""
        return [self.gpus.live_bytes(device) for device in range(DEVICES)]

    def allocations(self) -> list[int]:
        """Returns how many allocations a step makes on each device."""
        for device in range(DEVICES):
            self.gpus.fail_allocation(device, 0)
        self.results()
        return [self.gpus.allocations(device) for device in range(DEVICES)]

    def wrongs_afterwards(self) -> Iterator[str]:
        """Yields what is wrong after a step has failed and its error was dropped."""
        if self.way != "backward" and self.grads():
            yield f"a step that failed has left {len(self.grads())} gradients"
        self.zero()
        if not until(lambda: self.live() == self.bytes):
            yield f"{self.live()} bytes are alive, and were {self.bytes} before"
            self.bytes = self.live()
        for k, (now, right) in enumerate(zip(self.results(), self.right, strict=True)):
            if not torch.allclose(now, right):
                yield f"the next step is wrong in {'its loss' if k == 0 else f'gradient {k - 1}'}"


class Started(Observer):
    """An observer that notes the tasks that begin, on any thread."""

    def __init__(self) -> None:
        self.tasks: list[TaskInfo] = []

    def task_started(self, task: TaskInfo) -> None:
        self.tasks.append(task)


def until(condition: Callable[[], bool]) -> bool:
    """Polls ``condition``, for threads drop a task just after its caller went on.

    Returns whether the condition came true.
    """
    never = threading.Event()
    for _ in range(PATIENCE):
        if condition():
            return True
        never.wait(0.01)
    return condition()
