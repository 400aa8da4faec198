"""Tests the peaks that are predicted for a GPT against those of steps in lockstep."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipert import Pipe, pipeline, plan_for
from tests.devices.lockstep import in_lockstep
from tests.devices.subjects import SUBJECTS
from tests.simulated_gpus.simulation import Simulation

DEVICES = ["cuda:0", "cuda:1"]

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


class Skips(nn.Module):
    """Uses early tensors late, in its own code, as a U-Net does."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(2 * width, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], 1)).relu()
        return x


def test_peaks_of_a_model_whose_own_code_has_skips_are_as_predicted(gpus: Simulation) -> None:
    """Gradients of skips are freed once partition 0 has them, not when the step ends."""
    gc.collect()  # nothing older may be freed later
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    x = torch.randn(8192, 64, device=DEVICES[0])
    target = torch.randn(8192, 64, device=DEVICES[1])
    every = plan_for(
        Skips(), x, target=target, loss_fn=mse_loss, memory="1GiB", devices=DEVICES, chunks=[8],
        best=1000,
    )  # fmt: skip
    (each,) = [e for e in every if (e.schedule, e.checkpoint) == ("1f1b", "never")]
    with pipeline(
        Skips(), each.cuts, devices=each.devices, chunks=8, checkpoint="never"
    ) as pipe, in_lockstep():  # fmt: skip
        for device in DEVICES:
            torch.cuda.reset_peak_memory_stats(device)
        pipe.forward_backward(x, target=target, loss_fn=mse_loss)
        found = [torch.cuda.max_memory_allocated(device) for device in DEVICES]
    for predicted, peak, other in zip(each.peaks, found, before, strict=True):
        assert (peak - other) / 1.05 <= predicted <= 1.3 * (peak - other)  # rather too high


@pytest.mark.parametrize("checkpoint", ["never", "always", ("always", "never")])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "zb-h2"])
def test_peaks_are_as_predicted(
    gpus: Simulation, schedule: str, checkpoint: str | tuple[str, ...]
) -> None:
    subject = SUBJECTS["gpt"]()
    gc.collect()  # nothing older may be freed later
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
        assert (peak - other) / 1.05 <= predicted <= 1.1 * (peak - other)  # rather too high
