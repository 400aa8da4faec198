"""Tests that a partition waits for all copies of its skips, whichever of them are copied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import Skippable, pop, skippable, stash

pytestmark = [pytest.mark.cuda, pytest.mark.multi_gpu]


@skippable(stash=["early"])
class StashEarly(Skippable):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x * 2)
        return x * 3


@skippable(stash=["late"])
class StashLate(Skippable):
    def forward(self, x: Tensor) -> Any:
        yield stash("late", x * 2)
        return x * 3


@skippable(pop=["early", "late"])
class EarlyFirst(Skippable):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        late = yield pop("late")
        return early * late * x


@skippable(pop=["late", "early"])
class LateFirst(Skippable):
    def forward(self, x: Tensor) -> Any:
        late = yield pop("late")
        early = yield pop("early")
        return early * late * x


def call(pipe: Pipe, x: Tensor) -> None:
    pipe(x).square().mean().backward()


def call_without_grad(pipe: Pipe, x: Tensor) -> None:
    with torch.no_grad():
        pipe(x)


def step(pipe: Pipe, x: Tensor) -> None:
    pipe.forward_backward(x, loss_fn=lambda y, _: y.square().mean())


@pytest.mark.parametrize("run", [call, call_without_grad, step])
@pytest.mark.parametrize("last", [EarlyFirst, LateFirst])
@pytest.mark.parametrize("places", [*itertools.product([0, 1], repeat=3)], ids=str)
def test_two_skips_need_no_synchronisation(
    run: Callable[[Pipe, Tensor], None], last: type[nn.Module], places: Sequence[int]
) -> None:
    """Each skip, and the value beside them, comes from another device or not."""
    devices = [f"cuda:{k}" for k in (*places, 1)]
    module = nn.Sequential(StashEarly(), StashLate(), nn.Identity(), last())
    with Pipe(module, [1] * 4, devices=devices, chunks=4) as pipe:
        for _ in range(2):
            run(pipe, torch.randn(8, 4, device=devices[0], requires_grad=True))
