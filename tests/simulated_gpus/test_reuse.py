"""When memory may be reused: the purpose of record_stream."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.simulated_gpus.simulation import Simulation

pytestmark = pytest.mark.cuda

Kinds = Callable[[], list[str]]
DEVICE = torch.device("cuda:0")


def side_stream_reads(x: torch.Tensor) -> torch.cuda.Stream:
    side = torch.cuda.Stream(DEVICE)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        x.sum()
    return side


def test_memory_freed_while_another_stream_reads_it_may_be_used_again(kinds: Kinds) -> None:
    x = torch.ones(8, device=DEVICE)
    side_stream_reads(x)
    del x
    torch.zeros(8, device=DEVICE)
    assert kinds() == ["USE-AFTER-FREE"]


def test_record_stream_delays_reuse_of_memory(kinds: Kinds) -> None:
    x = torch.ones(8, device=DEVICE)
    x.record_stream(side_stream_reads(x))
    del x
    torch.zeros(8, device=DEVICE)
    assert kinds() == []


def test_an_owner_that_waits_before_it_allocates_is_safe(kinds: Kinds) -> None:
    x = torch.ones(8, device=DEVICE)
    side = side_stream_reads(x)
    del x
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    torch.zeros(8, device=DEVICE)
    assert kinds() == []


def test_memory_allocated_on_a_side_stream_belongs_to_that_stream(kinds: Kinds) -> None:
    side = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(side):
        x = torch.ones(8, device=DEVICE)
    torch.cuda.current_stream(DEVICE).wait_stream(side)
    x.sum()
    del x
    with torch.cuda.stream(side):
        torch.zeros(8, device=DEVICE)
    assert kinds() == ["USE-AFTER-FREE"]


def test_a_report_names_both_operations_and_the_memory(gpus: Simulation) -> None:
    gpus.detect(stacks=True)
    try:
        x = torch.ones(8, device=DEVICE)
        side_stream_reads(x)
        del x
        torch.zeros(8, device=DEVICE)
        (report,) = gpus.reports()
    finally:
        gpus.detect(stacks=False)
        gpus.clear()
    assert (report.now.name, report.memory.name) == ("allocate", "free")
    assert report.before.name.startswith("sum")
    assert "side_stream_reads" in report.before.stack[0]
    assert __file__ in report.now.stack[0] and __file__ in report.memory.stack[0]
    assert report.before.stream != report.now.stream == "cuda:0/stream0"
