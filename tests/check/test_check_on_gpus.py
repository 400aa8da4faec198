"""Tests the whole check, and faults that only GPUs can show, on GPUs or simulated ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import schedules
from pipert._typing import Tensors
from pipert.autograd import streams as stream
from pipert.autograd.streams import compute_stream
from pipert.check import checks
from pipert.check.command import QUICK, run
from pipert.check.ways import (
    BROKEN,
    HOLDS,
    NOT_CHECKED,
    REPORTED,
    Devices,
    Finding,
    Way,
    chain,
    transformer,
)
from pipert.pipes import base
from pipert.stage.stage import Task
from tests import simulated_gpus

pytestmark = pytest.mark.slow

GPUS = tuple(torch.device("cuda", k) for k in range(4))
TWO = Devices(GPUS[:2])


@pytest.fixture
def long_tasks() -> Iterator[None]:
    """Makes simulated devices slow, so that tasks are long in virtual time."""
    gpus = simulated_gpus.running()
    if gpus is not None:
        gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=1e-8)
    yield
    if gpus is not None:
        gpus.rates(launch_us=5, memory_gbps=1000, link_gbps=25, tflops=20)


def found_in_memory(steps: int = 4) -> dict[str, Finding]:
    found = checks.check_memory(TWO, chain(2, 8, layers=8, width=16, rows=64), steps)
    return {row.check: row for row in found}


@pytest.mark.cuda
@pytest.mark.timeout(240)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_checks_hold(n: int) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} CUDA devices")
    found = [*run(Devices(GPUS[:n] if n > 1 else GPUS[:1] * 2), QUICK)]
    outcomes = {row.check: row.outcome for row in found}
    assert BROKEN not in outcomes.values()
    assert outcomes["peak memory"] == outcomes["memory stays the same over steps"] == HOLDS
    assert outcomes["copies by torch alone"] == (NOT_CHECKED if n == 1 else HOLDS)


@pytest.mark.multi_gpu
def test_copies_that_torch_does_not_perform_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "copy_", lambda self, source: self)
    (found,) = checks.check_copies(TWO)
    assert found.outcome == BROKEN
    assert found.seen.startswith("cuda:0 to cuda:1: something else arrives; cuda:1 to cuda:0: ")


# Values -------------------------------------------------------------------------------------------


def change_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors]) -> None:
    """Let what is copied between GPUs arrive as something else."""
    copy = stream.copy

    def changed(tensors: Tensors, device: torch.device, *args: Any) -> Tensors:
        copied = copy(tensors, device, *args)
        between = {tensor.device for tensor in (*tensors, *copied)} == {*TWO.gpus}
        return change(copied) if between else copied

    monkeypatch.setattr(stream, "copy", changed)


@pytest.mark.multi_gpu
def test_copies_that_deliver_zeros_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    change_copies(monkeypatch, lambda copied: tuple(map(torch.zeros_like, copied)))
    (found,) = checks.check_values(TWO, [transformer(2, torch.float64)])
    assert found.outcome == BROKEN
    assert "without gradients: output differs by" in found.seen


@pytest.mark.multi_gpu
def test_copies_that_deliver_stale_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    last: dict[object, Tensor] = {}

    def stale(copied: Tensors) -> Tensors:
        before = tuple(last.get((x.shape, x.device), x) for x in copied)
        last.update({(x.shape, x.device): x.detach() for x in copied})
        return before

    change_copies(monkeypatch, stale)
    (found,) = checks.check_values(TWO, [transformer(2, torch.float64)])
    assert found.outcome == BROKEN


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_checkpointing_that_keeps_all_activations_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "recomputed_in_each", lambda mode, m, n: (0,) * n)
    found = found_in_memory()["peak memory"]
    assert found.outcome == BROKEN
    assert "cuda:0: loss.backward(), checkpoint='always' needs" in found.seen
    assert "1f1b" not in found.seen


@pytest.mark.multi_gpu
def test_a_1f1b_that_keeps_all_activations_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "plan", lambda schedule, *args: schedules.plan("gpipe", *args))
    found = found_in_memory()["peak memory"]
    assert found.outcome == BROKEN
    assert "1f1b" in found.seen and "checkpoint='always'" not in found.seen


@pytest.mark.multi_gpu
def test_growing_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(copied: Tensors) -> Tensors:
        kept.extend(x.detach() for x in copied)
        return copied

    change_copies(monkeypatch, keep)
    found = found_in_memory()["memory stays the same over steps"]
    assert found.outcome == BROKEN
    assert "bytes more in the second half of 4 steps" in found.seen


# Overlap ------------------------------------------------------------------------------------------


def overlapping() -> dict[str, Finding]:
    found = checks.check_overlap(TWO, chain(2, 8, layers=1, width=16, rows=16))
    return {row.check: row for row in found}


def most_hidden() -> int:
    """Returns the percentage of copies beside computation, of the schedule that has most."""
    seen = overlapping()["copies while computing"].seen
    return int(seen.partition(" to ")[2].partition("%")[0])


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("long_tasks")
def test_how_much_overlaps_is_reported() -> None:
    found = overlapping()["partitions at the same time"]
    assert found.outcome == REPORTED and "not judged" not in found.seen
    assert most_hidden() > 50


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("long_tasks")
def test_partitions_that_take_turns_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, last = threading.Lock(), [torch.cuda.Event()]  # type: ignore[no-untyped-call]
    execute = Task.execute

    def alone(task: Task, received: Any) -> Any:
        with lock:
            on = compute_stream(task._stage.place.device)
            assert on is not None
            on.wait_event(last[0])
            result = execute(task, received)
            last[0] = on.record_event()
            return result

    monkeypatch.setattr(Task, "execute", alone)
    monkeypatch.setattr(checks, "NEVER", [Way("gpipe", "never"), Way("1f1b", "never")])
    found = overlapping()["partitions at the same time"]
    assert found.outcome == BROKEN
    assert found.seen.startswith("0% to 0% of the time")
