"""Tests predicted peaks against those of steps in lockstep.

They are counted, so a bound is wide: never too low by more than a twentieth, and too high by at
most a fifth. Where a bound is wider, its reason is said.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models.unet import unet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from pipert import Pipe, pipeline, plan_for
from pipert.balance import calls, measure
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


class Rows(nn.Module):
    """A layer whose rows go to one of several experts."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList([
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        ])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        y, chosen = torch.zeros_like(x), weights.argmax(1)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, k, None])
        return x + y


class Experts(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Rows(width) for _ in range(4)])
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out(x)
        return y


def convolutions(channels: int = 16) -> nn.Sequential:
    """Works in place, as ResNets do."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(6):
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
    )


def gpt() -> Any:
    subject = SUBJECTS["gpt"]()
    return subject.model, *subject.batch(4, 2), subject.loss_fn


def images(rows: int, size: int) -> Tensor:
    return torch.rand(rows, 3, size, size)


MODELS: dict[str, tuple[Callable[[], Any], float, float]] = {
    "gpt": (gpt, 0.95, 1.2),
    "convolutions": (
        lambda: (convolutions(), images(16, 64), torch.randint(10, (16,)), cross_entropy),
        0.95, 1.2,
    ),
    # A gradient that is a view keeps all of the concatenation's.
    "U-Net": (lambda: (unet(1, 4), images(4, 64), torch.rand(4, 1, 64, 64), mse_loss), 0.87, 1.3),
    # Which experts get rows differs.
    "experts": (lambda: (Experts(), *torch.randn(2, 4096, 64), mse_loss), 0.95, 1.3),
    # As if all that own code has made at a time were there at once.
    "skips": (lambda: (Skips(), *torch.randn(2, 8192, 64), mse_loss), 0.95, 1.5),
}  # fmt: skip


def wrongs(name: str, schedules: Sequence[str], checkpoints: Sequence[Any]) -> list[str]:
    make, least, most = MODELS[name]
    model, x, target, loss_fn = make()
    gc.collect()
    before = [torch.cuda.memory_allocated(device) for device in DEVICES]
    x, target = x.to(DEVICES[0]), target.to(DEVICES[1])
    every = plan_for(
        model, x, target=target, loss_fn=loss_fn, memory="1GiB", devices=DEVICES, chunks=[4],
        best=1000,
    )  # fmt: skip
    wrong = []
    for way in itertools.product(schedules, checkpoints):
        (each,) = [e for e in every if (e.schedule, e.checkpoint) == way]
        options: Any = {
            "devices": each.devices, "chunks": 4, "checkpoint": each.checkpoint,
            "deferred_batch_norm": False,
        }  # fmt: skip
        copied = copy.deepcopy(model)
        gc.collect()  # nothing older may stay or be freed later
        with (
            pipeline(copied, each.cuts, **options) if each.cuts
            else Pipe(copied, each.balance, **options)
        ) as pipe, in_lockstep():  # fmt: skip
            for device in DEVICES:
                torch.cuda.reset_peak_memory_stats(device)
            pipe.forward_backward(x, target=target, loss_fn=loss_fn, schedule=each.schedule)
            peaks = [torch.cuda.max_memory_allocated(device) for device in DEVICES]
        for device, a, b, other in zip(DEVICES, each.peaks, peaks, before, strict=True):
            if not least <= (ratio := a / (b - other)) <= most:
                wrong.append(f"{way} on {device}: {ratio:.2f}")
    return wrong


@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_as_predicted(
    name: str, gpus: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    for module in (measure, calls):  # so that balances are the same in each run
        monkeypatch.setattr(module, "now", lambda _: next(ticks) / 1000)
    checkpoints = ["never", "always", ("always", "never")]
    assert not wrongs(name, ["1f1b", "eager-1f1b", "zb-h1", "zb-h2"], checkpoints)
