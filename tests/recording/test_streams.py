"""Tests recordings between GPUs: copies there and back, waits for them, and the devices' times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipert import Pipe
from pipert.observe import timeline
from pipert.observe.event import COPY, WAIT

CPU = torch.device("cpu")


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_a_copy_and_the_one_back_say_from_where_to_where_how_much_and_who_waits_for_them() -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    layers, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2, device=first)
    with Pipe(layers, [1, 1], devices=[first, second]) as pipe, pipe.record() as seen:
        torch.autograd.backward(pipe(x).sum())
    there, back = [event for event in seen.events if event.kind == COPY]
    assert (there.partition, there.origin, there.device, there.source) == (1, 0, second, first)
    assert (back.partition, back.origin, back.device, back.source) == (0, 1, first, second)
    assert there.bytes == back.bytes == 8
    assert 0 <= there.end - there.start and there.end <= back.start
    waits = {(event.partition, event.device) for event in seen.events if event.kind == WAIT}
    assert {(1, second), (0, first)} <= waits


class FakeEvent:
    """A CUDA event: its stream comes to it ``late`` ms after the first one."""

    def __init__(self, late: float) -> None:
        self.late = late
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert later.waited, "the device has not come so far"
        return later.late - self.late


def test_cuda_moments_have_the_devices_times(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    order: list[str] = []
    first = FakeEvent(5.0)

    def note(device: torch.device, stream: Any = None) -> FakeEvent:
        order.append("stamp")
        return first

    monkeypatch.setattr(timeline, "stamp", note)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    origin = timeline.Origin([CPU, cuda])
    assert order == ["synchronize", "stamp"] and first.waited
    late: list[Any] = [FakeEvent(15.0), FakeEvent(35.0)]
    ten, thirty = (origin.date(event, cuda) for event in late)
    assert thirty - ten == pytest.approx(0.020)
    assert 0.010 <= ten < 1.0
