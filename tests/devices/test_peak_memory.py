"""Tests by how many bytes each further micro-batch raises the peak of a device.

With 1F1B by its rows alone; with gpipe and in a call by what is kept from its forward to its
backward, which is measured by running the partition alone. Peaks are read in lockstep, where they
are the same in every run. That they are as predicted is in ``test_predicted_peaks.py``; how many
micro-batches are kept at once, in ``tests/contract/test_memory.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipert import Pipe
from pipert.batch.tensors import differentiable
from pipert.stage.step_boundary import StepBoundary
from tests.devices.lockstep import in_lockstep
from tests.devices.subjects import SUBJECTS, Subject, even, split
from tests.simulated_gpus.simulation import Simulation

WAYS = ("backward", "gpipe", "1f1b")
MODES = ("never", "except_last", "always")
ALONE = "cuda:7"  # where partitions run alone
NUMBERS = 16  # bytes of single numbers, such as the loss of a micro-batch
SAMPLES = 2 * 256 * 4  # bytes of those by which a recomputed output is compared

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]


class Needs(NamedTuple):
    """Bytes of one micro-batch in a partition."""

    given: int
    """Of the input, which is the caller's in partition 0."""
    sent: int
    saved: int
    """Of what the graph keeps, and that of the loss."""
    of_loss: int
    """Of what the loss alone keeps."""


def saved_by(
    functions: list[Callable[[Any], Any]], value: Tensor, others: list[Tensor]
) -> tuple[Tensor, int]:
    """Returns a result, and the bytes that its graph has saved, but for those of ``others``."""
    saved: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        for function in functions:
            value = function(value)
    without = {other.untyped_storage().data_ptr() for other in others}
    return value, sum(each.nbytes() for at, each in saved.items() if at not in without)


def needs_of(subject: Subject, n: int) -> list[Needs]:
    """Runs partitions one after the other on a device of their own."""
    model = copy.deepcopy(subject.model).to(ALONE)
    x, target, found = subject.x.to(ALONE), subject.target.to(ALONE), list[Needs]()
    for j, partition in enumerate(split(model, even(len(model), n))):
        others = [*partition.state_dict().values(), target, *([x] if j == 0 else [])]
        x.requires_grad_(x.is_floating_point())
        y, saved = saved_by([partition], x, others)
        loss = [lambda y: subject.loss_fn(y, target)] if j == n - 1 else []
        _, whole = saved_by([partition, *loss], x, others)
        found.append(Needs(x.nbytes * (j > 0), y.nbytes, whole, whole - saved))
        x = y.detach()
    return found


def peaks(gpus: Simulation, subject: Subject, n: int, m: int, way: str, mode: str) -> list[int]:
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
    """Returns what is wrong with the costs of a micro-batch."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    few, many = (peaks(gpus, subject, n, m, way, mode) for m in (n + 2, n + 4))
    needs = [Needs(0, 0, 0, 0)] * n if way == "1f1b" else needs_of(subject, n)
    outputs = 1 if name == "gpt" else 6  # with skips
    wrong = []
    for j, need in enumerate(needs):
        is_last, is_call = j == n - 1, way == "backward"
        least = subject.x.nbytes * (j == 0) + subject.target.nbytes * is_last
        least += need.saved - need.of_loss * is_call if mode == "never" else need.given
        if is_last and is_call:
            least += need.sent  # the caller holds them, gathered
        elif is_last and mode != "never":
            least += need.of_loss  # the loss is not recomputed
        # In a call, gradients of all micro-batches may have arrived.
        most = least + (need.sent + need.of_loss) * is_call + NUMBERS
        most += SAMPLES * outputs * (mode != "never")
        cost = (many[j] - few[j]) // 2
        if not least <= cost <= most:
            wrong.append(f"a micro-batch costs device {j} {cost} bytes, not {least} to {most}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    ("name", "way"), [*[("gpt", way) for way in WAYS], ("unet", "1f1b")]
)
def test_a_micro_batch_costs_what_is_kept_of_it(
    gpus: Simulation, name: str, n: int, way: str, mode: str
) -> None:
    assert wrongs(gpus, name, n, way, mode) == []


def test_graphs_that_stay_too_long_are_noticed(
    gpus: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition keeps the tensors saved for all of its micro-batches."""
    late: list[Any] = []
    leave = StepBoundary.leave

    def leave_and_keep(cut: StepBoundary, i: int, y: Any, segments: Any) -> Any:
        late.append(saved_behind(differentiable(y)[0][0].grad_fn))
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
