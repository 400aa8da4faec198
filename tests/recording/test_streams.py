"""Tests recordings between devices: copies there and back, and waits for them.

Streams are faked (``tests/helpers/driven_stages.py``), and moments are what was last asked of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import Event
from pipert.observe import run_trace, timeline
from pipert.observe.event import COPY, WAIT
from pipert.observe.run_trace import Trace
from tests.helpers.driven_stages import CPU, META, FakeStream, FakeStreams, run_between_devices


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fake = FakeStreams(monkeypatch)

    def note(device: torch.device, stream: FakeStream | None = None) -> float:
        fake.log.append(f"stamp on <{stream.name}>" if stream else f"stamp on {device}")
        return float(len(fake.log))

    for module in (timeline, run_trace):
        monkeypatch.setattr(module, "stamp", note)
    return fake


def record_step(fake: FakeStreams) -> tuple[list[Event], Tensor]:
    trace = Trace()
    with trace.record([CPU, META], [0, 1]) as recorded:
        y = run_between_devices(fake, trace=trace)
        torch.autograd.backward(y.sum())
    return list(recorded.events), y


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def test_a_copy_and_the_one_back_say_from_where_to_where_and_how_much(fake: FakeStreams) -> None:
    there, back = of(record_step(fake)[0], COPY)
    assert (there.partition, there.origin, there.device, there.source) == (1, 0, META, CPU)
    assert (back.partition, back.origin, back.device, back.source) == (0, 1, CPU, META)
    assert there.bytes == back.bytes == 8


def around(log: list[str], what: str) -> tuple[str, str]:
    """Returns the entries right before and right after the entry ``what``."""
    place = log.index(what)
    return log[place - 1], log[place + 1]


def test_copies_are_stamped_on_the_stream_that_does_them(fake: FakeStreams) -> None:
    record_step(fake)
    there = around(fake.log, "copy from <copy cpu 0> to <copy meta 0>")
    assert there == ("stamp on <copy cpu 0>",) * 2
    # Recorded, a gradient is copied from memory of its own, which is waited for.
    log = [each for each in fake.log if each != "<copy meta 0> waits for <compute meta>"]
    back = around(log, "copy from <copy meta 0> to <copy cpu 0>")
    assert back == ("stamp on <copy meta 0>",) * 2


@pytest.fixture
def same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of the same name are equal, as those of CUDA are."""
    monkeypatch.setattr(FakeStream, "__eq__", lambda one, other: one.name == other.name)


def test_waits_are_stamped_on_the_device_that_waits(
    fake: FakeStreams, same_streams: None
) -> None:
    events = of(record_step(fake)[0], WAIT)
    # The first is for the input to be sent, which is not asked for on CUDA devices.
    assert [(event.micro_batch, event.partition) for event in events] == [(0, 1), (0, 1), (0, 0)]
    there = around(fake.log, "<compute meta> waits for <copy meta 0>")
    back = around(fake.log, "<compute cpu> waits for <copy cpu 0>")
    assert there == ("stamp on meta",) * 2  # the current stream, which computes
    assert back == ("stamp on cpu",) * 2


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
