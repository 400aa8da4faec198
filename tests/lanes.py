"""Lanes driven by hand, without workers; and devices whose streams only note what they are told.

The second device is ``meta``, which tensors really are copied to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pipert import is_recomputing
from pipert.autograd import streams as stream
from pipert.autograd.streams import CopyStreams
from pipert.queues.closable import ClosableQueue
from pipert.schedules.clock_cycle import Schedule
from pipert.seeing.ledger import Ledger
from pipert.seeing.recorder import Recording
from pipert.skip.routes import PartitionSkips
from pipert.stage.lane import Lane
from pipert.stage.recorded_lane import RecordedLane
from pipert.stage.run import Run
from pipert.workers.activity import Activity, Seat
from pipert.workers.context import CallerContext
from pipert.workers.turn import Turn

CPU, META = torch.device("cpu"), torch.device("meta")
NO_SKIPS = PartitionSkips((), (), {})


class Driven:
    """A run of ``m`` micro-batches, whose lanes are made and driven by hand."""

    def __init__(
        self,
        m: int = 1,
        devices: Sequence[torch.device] = (CPU,),
        checkpointed: int = 0,
        recording: Recording | None = None,
    ) -> None:
        self.schedule = Schedule(m, len(devices))
        ledger = Ledger()
        if recording is not None:
            ledger.start_recording(recording)
        account = ledger.open(m, len(devices))
        context = CallerContext()
        self.run = Run(self.schedule, checkpointed, devices, context, CopyStreams(), account)
        self.progress = self.run.progress
        self.sent: list[Any] = []
        self.seat = Seat(Turn(threading.Lock()), Activity())

    def lane(
        self,
        layers: Iterable[nn.Module],
        receive: list[Any] | ClosableQueue[Any],
        j: int = 0,
        send: Callable[[Any], None] | None = None,
        skips: PartitionSkips = NO_SKIPS,
    ) -> Lane:
        kind = Lane if self.run.account.recorder is None else RecordedLane
        return kind(
            self.run,
            j,
            nn.Sequential(*layers),
            skips,
            (),
            None,
            receive,
            self.sent.append if send is None else send,
        )

    def outputs(self, layers: Iterable[nn.Module], inputs: list[Any]) -> list[Any]:
        """What the only lane sends."""
        lane = self.lane(layers, inputs)
        for i in range(self.progress.schedule.m):
            lane.forward(i, self.seat)
        assert self.progress.take_error() is None
        return self.sent


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeStreams:
    """The streams of two devices, and a log of what is asked of them and of the layers."""

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
    fake: FakeStreams, checkpointed: int = 0, recording: Recording | None = None
) -> Tensor:
    """F[0,0] on ``cpu`` and F[0,1] on ``meta``; the output."""
    run = Driven(1, [CPU, META], checkpointed, recording)
    run.run.streams = cast(CopyStreams, fake)
    between: list[Any] = []
    first = run.lane([fake.layer(0, CPU)], [torch.ones(2)], 0, between.append)
    second = run.lane([fake.layer(1, META)], between, 1)
    first.forward(0, run.seat)
    second.forward(0, run.seat)
    error = run.progress.take_error()
    if error is not None:
        raise error
    y: Tensor = run.sent[0]
    return y
