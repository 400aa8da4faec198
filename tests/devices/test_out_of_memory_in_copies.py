"""Tests that each kind of copy between devices runs out of memory at its destination at least once.

``test_out_of_memory.py`` checks the guarantees; this file checks that every place is reached.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipert.autograd import transfer
from pipert.stage.copies import Copies
from tests.devices.out_of_memory import Tight
from tests.simulated_gpus.simulation import Simulation

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

FORWARD = {
    (0, None): "an argument of the call",
    (1, 0): "the value for the next partition",
    (2, 0): "a skip",
    (2, 1): "the value for the last partition",
    (2, None): "a weight that lives on another device",
}
BACK = {(1, 2): "its gradient", (0, 1): "its gradient", (0, 2): "the gradient of the skip"}


def fail_all(tight: Tight) -> None:
    """Runs a step for each allocation, which fails in it."""
    for device, count in enumerate(tight.allocations()):
        for number in range(1, count + 1):
            tight.gpus.fail_allocation(device, number)
            try:
                tight.step()
            except torch.OutOfMemoryError:
                pass
            tight.gpus.fail_allocation(device, 0)
            tight.zero()


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int | None]]:
    """Collects the destination and the source partition of each copy that ran out of memory."""
    places: set[tuple[int, int | None]] = set()
    bring = Copies.bring

    def watched(copies: Copies, i: int, x: Any, origin: int | None) -> Any:
        try:
            return bring(copies, i, x, origin)
        except torch.OutOfMemoryError:
            places.add((copies._device.index, origin))
            raise

    monkeypatch.setattr(Copies, "bring", watched)
    return places


def test_each_copy_of_a_step_can_run_out_of_memory(
    gpus: Simulation, failed: set[tuple[int, int | None]]
) -> None:
    tight = Tight(gpus, "1f1b", "always")
    with tight.pipe:
        fail_all(tight)
    assert failed == {*FORWARD, *BACK}


def test_each_copy_of_a_call_and_of_its_backward_can_run_out_of_memory(
    gpus: Simulation, failed: set[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    back: set[int] = set()
    plain = transfer._Copy.backward

    def watched(ctx: Any, *grads: Any) -> Any:
        try:
            return plain(ctx, *grads)
        except torch.OutOfMemoryError:
            back.add(ctx.back[0].index)
            raise

    monkeypatch.setattr(transfer._Copy, "backward", staticmethod(watched))
    tight = Tight(gpus, "backward", "always")
    with tight.pipe:
        fail_all(tight)
    assert failed == {*FORWARD}
    assert back == {0, 1, 3}  # 3 is the device of the inputs
