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
