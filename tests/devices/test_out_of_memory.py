"""Tests that the guarantees hold when memory runs out at any allocation of any device.

``torch.OutOfMemoryError`` reaches the caller with its type and, if it was raised in a task, a note
that says where (R3); no later task of its device starts (R4); nothing of the step stays alive, and
the next step is right (R5). The simulation checks that every access is ordered meanwhile (D1).
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipert import Pipe
from pipert.stage.copies import Copies
from tests.devices import out_of_memory
from tests.devices.lockstep import in_lockstep
from tests.devices.out_of_memory import Started, Tight
from tests.devices.subjects import SUBJECTS, even
from tests.simulated_gpus.simulation import Simulation

WAYS = ("backward", "gpipe", "1f1b")
MODES = ("never", "except_last", "always")
PLACES = 6  # tried on each device, spread over its allocations

NOTE = re.compile(
    r"in (forward F|recomputation R|backward B)\[(\d),(\d)\]: partition \3 on cuda:(\d)"
    r"(, layer '\w+' \(\w+\))?, micro-batch \2 of 3"
)
LETTER = {"forward": "F", "recomputation": "R", "backward": "B"}

pytestmark = [pytest.mark.multi_gpu, pytest.mark.usefixtures("no_gc_in_module")]


def wrongs_of(error: torch.OutOfMemoryError, device: int, way: str, started: Started) -> list[str]:
    """Returns what is wrong with the error of a failed allocation on ``device``."""
    notes: list[str] = getattr(error, "__notes__", [])
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    in_task = "execute" in functions or "recompute" in functions
    if not in_task:
        return [f"a note outside of tasks: {notes}"] if notes else []
    if len(notes) != 1:
        return [f"{len(notes)} notes: {notes}"]
    found = NOTE.match(notes[0].replace(", loss_fn", ""))
    if found is None or int(found[4]) != device:
        return [f"a note that does not say where cuda:{device} was out of memory: {notes[0]}"]
    kind, i, j = found[1][-1], int(found[2]), int(found[3])
    if kind == "R" and way == "backward":
        return []  # pipert cannot stop autograd's walk
    tasks = [(LETTER[t.phase], t.micro_batch) for t in started.tasks if t.partition == j]
    later = tasks[tasks.index((kind, i)) + 1 :] if (kind, i) in tasks else []
    return [f"after {notes[0]} its partition has begun {later}"] if later else []


def wrongs(tight: Tight, device: int, number: int) -> Iterator[str]:
    """Yields what is wrong if this allocation of the device fails in a step."""
    started = Started()
    tight.pipe.add_observer(started)
    tight.gpus.fail_allocation(device, number)
    failed = False
    try:
        tight.step()
    except torch.OutOfMemoryError as error:
        failed = True
        yield from wrongs_of(error, device, tight.way, started)
    tight.pipe.remove_observer(started)
    # With loss.backward() the threads' timing decides how often autograd adds gradients.
    if not failed and tight.way != "backward":
        yield "nothing was raised"
    tight.gpus.fail_allocation(device, 0)
    if failed:
        yield from tight.wrongs_afterwards()
    tight.zero()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_guarantees_hold_when_any_allocation_fails(gpus: Simulation, way: str, mode: str) -> None:
    tight = Tight(gpus, way, mode)
    found = []
    with tight.pipe:
        for device, count in enumerate(tight.allocations()):
            for number in range(1, count + 1, max(1, count // PLACES)):
                at = f"allocation {number} of {count} on cuda:{device}: "
                found += [at + wrong for wrong in wrongs(tight, device, number)]
    assert found == []


@pytest.mark.parametrize("way", WAYS)
def test_the_check_notices_memory_that_a_failed_step_leaves_behind(
    gpus: Simulation, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """An injected fault keeps the input of the last task alive."""
    tight, last = Tight(gpus, way, "never"), list[Any]()
    bring = Copies.bring

    def bring_and_keep(copies: Copies, i: int, x: Any, origin: int | None) -> Any:
        last[:] = [brought := bring(copies, i, x, origin)]  # shared by all workers
        return brought

    monkeypatch.setattr(Copies, "bring", bring_and_keep)
    monkeypatch.setattr(out_of_memory, "PATIENCE", 1)
    with tight.pipe:
        found = list(wrongs(tight, 2, 8))
    assert len(found) == 1 and "bytes are alive" in found[0]


# Devices with limited memory ----------------------------------------------------------------------


class Limited:
    """A GPT on two devices, and 16 rows for it."""

    def __init__(self, gpus: Simulation, mode: str, chunks: int) -> None:
        torch.manual_seed(0)
        self.gpus, self.subject = gpus, SUBJECTS["gpt"]()
        self.x, self.target = self.subject.batch(8, 2)
        balance = even(len(self.subject.model), 2)
        model = copy.deepcopy(self.subject.model)
        devices = ["cuda:0", "cuda:1"]
        self.pipe = Pipe(model, balance, devices=devices, chunks=chunks, checkpoint=mode)

    def step(self, way: str) -> list[torch.Tensor]:
        """Returns the gradients of a step, on the CPU."""
        if way == "backward":
            torch.autograd.backward(self.subject.loss_fn(self.pipe(self.x), self.target))
        else:
            loss_fn = self.subject.loss_fn
            self.pipe.forward_backward(self.x, target=self.target, loss_fn=loss_fn, schedule=way)
        grads = [p.grad.cpu() for p in self.pipe.parameters() if p.grad is not None]
        self.pipe.zero_grad()
        return grads

    def plain(self) -> list[torch.Tensor]:
        """Returns the gradients of the plain module."""
        model = copy.deepcopy(self.subject.model)
        loss = self.subject.loss_fn(model(self.x.cpu()), self.target.cpu())
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def peaks(self, way: str) -> list[int]:
        """Returns the peaks of both devices, in lockstep."""
        for device in range(2):
            torch.cuda.reset_peak_memory_stats(device)
        with in_lockstep():
            self.step(way)
        return [self.gpus.peak_bytes(device) for device in range(2)]

    def limit(self, sizes: list[int]) -> None:
        for device, size in enumerate(sizes):
            self.gpus.limit_memory(device, size)


def same(grads: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Compares gradients, up to the order of summation."""
    return len(grads) == len(others) and all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(grads, others, strict=True)
    )


@pytest.mark.slow
def test_a_step_too_large_with_gpipe_fits_with_1f1b(gpus: Simulation) -> None:
    limited = Limited(gpus, "never", 8)
    with limited.pipe:
        few, many = limited.peaks("1f1b"), limited.peaks("gpipe")
        limited.limit([(one + other) // 2 for one, other in zip(few, many, strict=True)])
        with pytest.raises(torch.OutOfMemoryError) as caught:
            limited.step("gpipe")
        assert "in forward F[" in caught.value.__notes__[0]
        caught.value.__traceback__ = None
        del caught
        assert same(limited.step("1f1b"), limited.plain())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_does_not_fit_can_be_repeated_with_smaller_micro_batches(
    gpus: Simulation, way: str
) -> None:
    """As users do it: with the same pipe, after dropping the error of the last attempt."""
    limited, tries = Limited(gpus, "always", 8), list[int]()
    with limited.pipe as pipe:
        limited.limit([int(peak * 1.25) for peak in limited.peaks(way)])
        pipe.chunks, grads = 1, list[torch.Tensor]()
        while not grads:
            tries.append(pipe.chunks)
            try:
                grads = limited.step(way)
            except torch.OutOfMemoryError:
                pipe.zero_grad()
                pipe.chunks *= 2
        assert tries[0] == 1 < tries[-1] <= 16
        assert same(grads, limited.plain())
