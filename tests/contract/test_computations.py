"""Counts how often each layer runs: once forward, and once again where it is recomputed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe, pipeline
from tests.contract.ways import CALL, MODES, Way, take_step

CHUNKS, SIZE = 4, 8
SCHEDULES = [CALL, "gpipe", "1f1b", "eager-1f1b", "zb-h1"]


class Counted(nn.Module):
    """A layer that has its calls counted and uses one of its weights twice."""

    def __init__(self, count: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.norm, self.count = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), count

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        y = torch.tanh(self.norm(self.linear(x)))
        return x + nn.functional.linear(y, self.linear.weight)


def piped(kind: str, module: nn.Sequential, mode: str) -> Any:
    options: Any = {"devices": ["cpu"] * 2, "chunks": CHUNKS, "checkpoint": mode}
    if kind == "Pipe":
        return Pipe(module, [2, 2], **options)
    return pipeline(module, ["2"], example=torch.ones(4, SIZE), **options)


Region = Callable[[], contextlib.AbstractContextManager[object]]
REGIONS: dict[str, Region] = {
    "no autocast": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("region", REGIONS)
def test_each_layer_runs_once_and_once_again_where_it_is_recomputed(
    region: str, schedule: str, mode: str, kind: str
) -> None:
    torch.manual_seed(0)
    calls = Counter[str]()
    first, shared, third = [Counted(partial(calls.update, [name])) for name in "abc"]
    with piped(kind, nn.Sequential(first, shared, third, shared), mode) as pipe:
        calls.clear()
        for _ in range(2):
            with REGIONS[region]():
                take_step(pipe, Way(schedule, mode), torch.randn(8, SIZE), loss_fn=_loss)
    recomputed = {"always": CHUNKS, "except_last": CHUNKS - 1, "never": 0}[mode]
    once = 2 * (CHUNKS + recomputed)
    assert calls == {"a": once, "b": 2 * once, "c": once}


def _loss(y: Tensor, _: Any) -> Tensor:
    return y.float().square().mean()
