"""Tests the whole check, and faults that only GPUs can show, on GPUs or simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import check, schedules
from pipert._typing import Tensors
from pipert.autograd import streams as stream
from pipert.check import BROKEN, HOLDS, Finding
from pipert.pipes import base

pytestmark = pytest.mark.slow

GPUS = [torch.device("cuda", k) for k in range(4)]
TWO = GPUS[:2]


def found_in_memory() -> dict[str, Finding]:
    chain = check.chain(2, 8, depth=8, width=16, rows=64)
    return {found.check: found for found in check.check_memory("peak memory", chain, TWO, 2)}


@pytest.mark.cuda
@pytest.mark.timeout(240)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_checks_hold(n: int) -> None:
    if torch.cuda.device_count() < n:
        pytest.skip(f"needs {n} CUDA devices")
    found = [*check.run(GPUS[:n] if n > 1 else GPUS[:1] * 2, *check.QUICK)]
    assert [one.outcome for one in found] == [HOLDS] * 5, found


# Values -------------------------------------------------------------------------------------------


def change_copies(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors]) -> None:
    """Let what is copied between GPUs arrive as something else."""
    copy = stream.copy

    def changed(tensors: Tensors, device: torch.device, *args: Any) -> Tensors:
        copied = copy(tensors, device, *args)
        between = {tensor.device for tensor in (*tensors, *copied)} == {*TWO}
        return change(copied) if between else copied

    monkeypatch.setattr(stream, "copy", changed)


@pytest.mark.multi_gpu
def test_copies_that_deliver_zeros_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    change_copies(monkeypatch, lambda copied: tuple(map(torch.zeros_like, copied)))
    (found,) = check.check_values("values", check.transformer(2), TWO, 0)
    assert found.outcome == BROKEN
    assert "Pipe, without gradients: output differs by" in found.seen


@pytest.mark.multi_gpu
def test_copies_that_deliver_stale_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    last: dict[object, Tensor] = {}

    def stale(copied: Tensors) -> Tensors:
        before = tuple(last.get((x.shape, x.device), x) for x in copied)
        last.update({(x.shape, x.device): x.detach() for x in copied})
        return before

    change_copies(monkeypatch, stale)
    (found,) = check.check_values("values", check.transformer(2), TWO, 0)
    assert found.outcome == BROKEN


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.multi_gpu
def test_checkpointing_that_keeps_all_activations_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "recomputed_in_each", lambda mode, m, n: (0,) * n)
    found = found_in_memory()["peak memory"]
    assert found.outcome == BROKEN
    assert "Pipe, cuda:0: ('loss.backward()', 'always') needs" in found.seen
    assert "1f1b" not in found.seen


@pytest.mark.multi_gpu
def test_a_1f1b_that_keeps_all_activations_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "plan", lambda schedule, *args: schedules.plan("gpipe", *args))
    found = found_in_memory()["peak memory"]
    assert found.outcome == BROKEN
    assert "1f1b" in found.seen and "'always'" not in found.seen


@pytest.mark.multi_gpu
def test_growing_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(copied: Tensors) -> Tensors:
        kept.extend(x.detach() for x in copied)
        return copied

    change_copies(monkeypatch, keep)
    found = found_in_memory()["memory stays the same over steps"]
    assert found.outcome == BROKEN
    assert "Pipe, loss.backward(), checkpoint='never': " in found.seen
