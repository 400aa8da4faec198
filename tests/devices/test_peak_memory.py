"""Tests the peak bytes of each device against the bytes that its partition has to hold.

They are measured in lockstep, where peaks are the same in every run; ``expected.py`` predicts them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import Pipe
from pipert.batch.tensors import differentiable
from pipert.stage.step_boundary import StepBoundary
from tests.devices.expected import bounds, for_each
from tests.devices.lockstep import in_lockstep
from tests.devices.subjects import SUBJECTS, Parts, Subject, even
from tests.simulated_gpus.simulation import Simulation

WAYS = ("backward", "gpipe", "1f1b")
MODES = ("never", "except_last", "always")
ALONE = 7  # the device where partitions run alone

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

found: dict[tuple[str, int], tuple[Subject, Parts]] = {}


def subject_and_parts(gpus: Simulation, name: str, n: int) -> tuple[Subject, Parts]:
    """Returns a model and its measured partitions, which are kept for all tests."""
    if (name, n) not in found:
        torch.manual_seed(0)
        subject = SUBJECTS[name]()
        found[name, n] = subject, Parts(gpus, subject, n, ALONE)
    return found[name, n]


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Iterator[None]:
    yield
    found.clear()


def peaks(
    gpus: Simulation, subject: Subject, n: int, m: int, way: str, mode: str
) -> list[int]:
    """Returns the peak of each device in one step, at whose start no ``.grad`` exists.

    What other tests have left on the devices does not count.
    """
    before = [gpus.live_bytes(j) for j in range(n)]
    x, target = subject.batch(m, n)
    model, devices = copy.deepcopy(subject.model), [f"cuda:{j}" for j in range(n)]
    with Pipe(model, even(len(model), n), devices=devices, chunks=m, checkpoint=mode) as pipe:
        with in_lockstep():
            for j in range(n):
                torch.cuda.reset_peak_memory_stats(j)
            if way == "backward":
                torch.autograd.backward(subject.loss_fn(pipe(x), target))
            else:
                pipe.forward_backward(x, target=target, loss_fn=subject.loss_fn, schedule=way)
            return [gpus.peak_bytes(j) - before[j] for j in range(n)]


def wrongs(gpus: Simulation, name: str, n: int, way: str, mode: str) -> list[str]:
    """Returns what is wrong with the peaks of ``n + 2`` and ``n + 4`` micro-batches."""
    subject, parts = subject_and_parts(gpus, name, n)
    few, many = n + 2, n + 4
    seen, more = (peaks(gpus, subject, n, m, way, mode) for m in (few, many))
    setting, wrong = subject.setting(way, mode, few, parts), []
    for j, part in enumerate(parts.of(way)):
        peak = bounds(setting, parts.of(way), j, parts.of_loss)
        if not peak.least <= seen[j] <= peak.most:
            wrong.append(f"device {j} had {seen[j]} bytes at its peak, not {peak}")
        each, cost = for_each(setting, part, j, n, parts.of_loss), (more[j] - seen[j]) // 2
        if not each.least <= cost <= each.most:
            wrong.append(f"a micro-batch costs device {j} {cost} bytes, not {each}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", SUBJECTS)
def test_peaks_and_costs_of_a_micro_batch_are_as_predicted(
    gpus: Simulation, name: str, n: int, way: str, mode: str
) -> None:
    assert wrongs(gpus, name, n, way, mode) == []


# Injected leaks, which must be noticed ------------------------------------------------------------


def test_a_graph_that_stays_too_long_is_noticed(
    gpus: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition keeps the tensors saved for its previous micro-batch."""
    late: dict[int, Any] = {}
    leave = StepBoundary.leave

    def leave_and_keep(cut: StepBoundary, i: int, y: Any, segments: Any) -> Any:
        j, node = cut._place.j, differentiable(y)[0][0].grad_fn
        late[j] = [*late.get(j, [])[-1:], saved_behind(node)]
        return leave(cut, i, y, segments)

    monkeypatch.setattr(StepBoundary, "leave", leave_and_keep)
    assert wrongs(gpus, "gpt", 2, "1f1b", "never")


def saved_behind(node: Any) -> list[Tensor]:
    """Returns the tensors that the graph of ``node`` has saved."""
    seen, left, tensors = set(), [node], list[Tensor]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, Tensor):
                tensors.append(value)
        left += [child for child, _ in node.next_functions]
    return tensors
