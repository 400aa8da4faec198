"""Tests copy streams; on CPU there are none, and waits and copies do nothing."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pipert.autograd import streams as stream
from pipert.autograd.streams import CopyStreams

CPU = torch.device("cpu")


class FakeStream:
    """A stream that notes the streams it is told to wait for."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.awaited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.awaited.append(other)

    wait_event = wait_stream

    def record_event(self) -> FakeStream:
        return self


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provides fake streams of missing devices."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)


def test_there_is_no_copy_stream_on_cpu() -> None:
    assert CopyStreams().get(CPU, 0) is None


def test_there_is_no_compute_stream_on_cpu() -> None:
    assert stream.compute_stream(CPU) is None


def test_there_is_one_copy_stream_for_each_cuda_device_and_micro_batch(fakes: None) -> None:
    streams = CopyStreams()
    places = [(torch.device("cuda", k), i) for k in range(2) for i in range(3)]
    assert len({id(streams.get(*place)) for place in places}) == 6


def test_a_copy_stream_is_on_its_device(fakes: None) -> None:
    got = CopyStreams().get(torch.device("cuda", 1), 0)
    assert got is not None and got.device == torch.device("cuda", 1)


def test_a_new_copy_stream_waits_for_earlier_work_of_its_device(fakes: None) -> None:
    got: Any = CopyStreams().get(torch.device("cuda", 1), 0)
    assert [awaited.device for awaited in got.awaited] == [torch.device("cuda", 1)]


def test_copy_streams_are_kept(fakes: None) -> None:
    streams = CopyStreams()
    assert streams.get(torch.device("cuda", 0), 2) is streams.get(torch.device("cuda", 0), 2)


def test_the_repr_counts_the_streams_that_were_made(fakes: None) -> None:
    streams = CopyStreams()
    streams.get(torch.device("cuda", 0), 0)
    streams.get(CPU, 0)
    assert repr(streams) == "<CopyStreams, 1 made>"


def test_a_stream_waits_for_another_one() -> None:
    waiter, awaited = FakeStream(), FakeStream()
    stream.wait(cast(Any, waiter), cast(Any, awaited))
    assert waiter.awaited == [awaited] and awaited.awaited == []


@pytest.mark.parametrize(
    ("waiter", "awaited"), [(None, None), (None, FakeStream()), (FakeStream(), None)]
)
def test_nothing_waits_for_the_cpu_nor_the_cpu_for_anything(waiter: Any, awaited: Any) -> None:
    stream.wait(waiter, awaited)
    assert [s.awaited for s in (waiter, awaited) if s is not None] in ([], [[]])


def test_a_copy_on_cpu_is_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert stream.copy((x,), CPU, None, None)[0] is x


def test_a_copy_goes_to_the_device_asked_for() -> None:
    tensors = torch.ones(2), torch.ones(3)
    copies = stream.copy(tensors, torch.device("meta"), None, None)
    assert [(str(c.device), tuple(c.shape)) for c in copies] == [("meta", (2,)), ("meta", (3,))]
