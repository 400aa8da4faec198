"""Drives stages by hand, without workers, on devices whose streams only log their operations.

The second device is ``meta``, to which tensors are really copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipert import is_recomputing
from pipert.autograd import streams as stream
from pipert.autograd.streams import CopyStreams
from pipert.layers.random_numbers import RunSeed
from pipert.observe.run_trace import Trace
from pipert.schedules.action import Action
from pipert.schedules.plan import plan_call
from pipert.skip.declarations import keys_of
from pipert.stage.assembly import Layered as Model
from pipert.stage.assembly import assemble
from pipert.stage.run import Run
from pipert.stage.stage import Task
from pipert.workers.context import CallerContext
from pipert.workers.worker import NOT_RUN

CPU, META = torch.device("cpu"), torch.device("meta")


def do(task: Task) -> None:
    """Carries out ``task`` as a worker does."""
    value = task.receive()
    if value is not NOT_RUN:
        value = task.execute(value)
    task.send(value)


class Driven:
    """A run whose stages are driven by hand.

    Args:
        partitions: the layers of each partition.
        inputs: the input of each micro-batch.
        devices: the device of each partition; default the CPU.
        recomputed: the number of micro-batches, from the first, that are recomputed.
        streams: the copy streams.
        trace: the trace of the run; by default, one of which nobody is told.
    """

    def __init__(
        self,
        partitions: Sequence[Iterable[nn.Module]],
        inputs: list[Any],
        devices: Sequence[torch.device] | None = None,
        recomputed: int = 0,
        streams: FakeStreams | None = None,
        trace: Trace | None = None,
    ) -> None:
        n, m = len(partitions), len(inputs)
        self.plan = plan_call(m, n, range(n), recomputed)
        trace = Trace() if trace is None else trace
        copy_streams = CopyStreams() if streams is None else cast(CopyStreams, streams)
        self._opened = trace.open(self.plan)  # never left
        run_trace = self._opened.__enter__()
        context, seed = CallerContext(), RunSeed()
        self.run = Run(self.plan, devices or n * [CPU], context, copy_streams, run_trace, seed)
        self.outcome = self.run.outcome
        layers = tuple([nn.Sequential(*partition) for partition in partitions])
        model = Model(layers, tuple(map(keys_of, layers)))
        self.stages = assemble(self.run, model, inputs, None, None)

    def task(self, action: Action | str) -> Task:
        if isinstance(action, str):  # "F[0,1]"
            action = Action(action[0], *map(int, action[2:-1].split(",")))
        return Task(self.stages[action.j], action)

    def do(self, *actions: Action | str) -> list[Any]:
        """Carries out some actions; returns the outputs that have reached the caller."""
        for action in actions:
            do(self.task(action))
        return self.run.outputs

    def go(self) -> list[Any]:
        """Carries out all actions in the order of the plan; returns the outputs."""
        self.do(*self.plan)
        error = self.outcome.take_error()
        if error is not None:
            raise error
        return self.run.outputs


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeStreams:
    """The streams of two devices, and a log of their operations and of the layers' tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(stream, "compute_stream", lambda d: FakeStream(f"compute {d}"))
        monkeypatch.setattr(stream, "wait", self.wait)
        monkeypatch.setattr(stream, "copy", self.copy)

    def get(self, device: torch.device, i: int) -> FakeStream:
        return FakeStream(f"copy {device} {i}")

    def wait(self, waiter: FakeStream | None, awaited: FakeStream | None) -> None:
        if waiter is not None and awaited is not None:
            self.log.append(f"<{waiter.name}> waits for <{awaited.name}>")

    def copy(
        self,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        source: FakeStream,
        target: FakeStream,
        reader: object = None,
    ) -> tuple[Tensor, ...]:
        self.log.append(f"copy from <{source.name}> to <{target.name}>")
        return tuple(torch.zeros_like(tensor, device=device) for tensor in tensors)

    def layer(self, j: int, device: torch.device) -> nn.Module:
        return LoggingLayer(j, device, self.log)


class _LogBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, j: int, log: list[str]) -> Tensor:
        ctx.j, ctx.log = j, log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"B[0,{ctx.j}]")
        return grads[0], None, None


class LoggingLayer(nn.Module):
    def __init__(self, j: int, device: torch.device, log: list[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device=device))
        self.j = j
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{'R' if is_recomputing() else 'F'}[0,{self.j}]")
        y: Tensor = _LogBackward.apply(  # type: ignore[no-untyped-call]
            x * self.weight, self.j, self.log
        )
        return y


def run_between_devices(
    fake: FakeStreams, recomputed: int = 0, trace: Trace | None = None
) -> Tensor:
    """Carries out F[0,0] on ``cpu`` and F[0,1] on ``meta``; returns the output."""
    layers = [[fake.layer(0, CPU)], [fake.layer(1, META)]]
    run = Driven(layers, [torch.ones(2)], [CPU, META], recomputed, fake, trace)
    y: Tensor = run.go()[0]
    return y
