"""Tests the peaks that are predicted for a GPT against those of steps in lockstep."""

from __future__ import annotations

import copy

import pytest
import torch

from pipert import Pipe, plan_for
from tests.devices.lockstep import in_lockstep
from tests.devices.subjects import SUBJECTS
from tests.simulated_gpus.simulation import Simulation

DEVICES = ["cuda:0", "cuda:1"]

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


@pytest.mark.parametrize("checkpoint", ["never", "always", ("always", "never")])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_peaks_are_as_predicted(
    gpus: Simulation, schedule: str, checkpoint: str | tuple[str, ...]
) -> None:
    subject = SUBJECTS["gpt"]()
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    x, target = subject.batch(4, 2)
    every = plan_for(
        subject.model, x, target=target, loss_fn=subject.loss_fn, memory="1GiB", devices=DEVICES,
        chunks=[4], best=100,
    )  # fmt: skip
    (each,) = [e for e in every if (e.schedule, e.checkpoint) == (schedule, checkpoint)]
    with Pipe(
        copy.deepcopy(subject.model), each.balance, devices=each.devices, chunks=each.chunks,
        checkpoint=each.checkpoint,
    ) as pipe, in_lockstep():  # fmt: skip
        for device in DEVICES:
            torch.cuda.reset_peak_memory_stats(device)
        pipe.forward_backward(
            x, target=target, loss_fn=subject.loss_fn, schedule=each.schedule
        )
        found = [torch.cuda.max_memory_allocated(device) for device in DEVICES]
    for predicted, peak, other in zip(each.peaks, found, before, strict=True):
        assert predicted == pytest.approx(peak - other, rel=0.1)
