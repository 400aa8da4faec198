"""The host: what it may read and write during copies, and what makes it wait."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.cuda

Kinds = Callable[[], list[str]]
DEVICE = torch.device("cuda:0")


def pinned(value: float) -> torch.Tensor:
    return torch.full((4,), value).pin_memory()


def test_the_host_reads_nothing_before_it_has_waited_for_a_copy_to_it(kinds: Kinds) -> None:
    there = torch.arange(4.0, device=DEVICE)
    torch.cuda.synchronize(DEVICE)
    here = there.to("cpu", non_blocking=True)
    assert here.isnan().all()
    torch.cuda.synchronize(DEVICE)
    assert here.tolist() == [0, 1, 2, 3]


def test_an_event_before_the_copy_is_not_enough_for_the_host(kinds: Kinds) -> None:
    there = torch.arange(4.0, device=DEVICE)
    event = torch.cuda.current_stream(DEVICE).record_event()
    here = there.to("cpu", non_blocking=True)
    event.synchronize()
    assert here.isnan().all()


def test_a_copy_back_to_the_device_sees_what_the_stream_has_copied_before(kinds: Kinds) -> None:
    here = torch.arange(4.0, device=DEVICE).to("cpu", non_blocking=True)
    assert here.to(DEVICE, non_blocking=True).tolist() == [0, 1, 2, 3]


def test_a_host_write_during_a_copy_from_it_is_reported(kinds: Kinds) -> None:
    here = pinned(1)
    here.to(DEVICE, non_blocking=True)
    here.fill_(2)
    torch.cuda.synchronize(DEVICE)
    assert kinds() == ["HOST-RACE"]


def test_memory_that_is_not_pinned_has_been_read_when_the_call_returns(kinds: Kinds) -> None:
    here = torch.ones(4)
    there = here.to(DEVICE, non_blocking=True)
    here.fill_(2)
    assert there.tolist() == [1, 1, 1, 1]
    assert kinds() == []


def test_a_mask_lets_the_host_wait_and_an_index_does_not(kinds: Kinds) -> None:
    x, side = torch.arange(4.0, device=DEVICE), torch.cuda.Stream(DEVICE)
    mask, index = x > 1, torch.tensor([0, 2], device=DEVICE)
    for key, expected in ((index, ["RACE"]), (mask, [])):
        torch.cuda.synchronize(DEVICE)
        with torch.cuda.stream(side):
            y = torch.zeros(4, device=DEVICE)
        side.synchronize()
        y.add_(1)
        y[key]
        with torch.cuda.stream(side):
            y.add_(1)
        assert sorted(set(kinds())) == expected
