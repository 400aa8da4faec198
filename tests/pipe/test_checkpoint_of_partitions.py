"""Tests pipes that recompute some of their partitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import pipert
from pipert import Pipe
from tests.helpers.ways import grads_of, linear, mean, same

MODES = ["always", "never", "except_last"]
SCHEDULES = ["call", "gpipe", "1f1b", "zb-h1"]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(linear(3, 3), nn.Dropout(0.5)) for _ in range(3)])


def piped(kind: str, module: nn.Sequential, checkpoint: Any) -> Any:
    options: dict[str, Any] = {"devices": ["cpu"] * 3, "chunks": 4, "checkpoint": checkpoint}
    if kind == "Pipe":
        return Pipe(module, [1, 1, 1], **options)
    return pipert.pipeline(module, ["1", "2"], **options)


def step(pipe: Any, schedule: str) -> Any:
    torch.manual_seed(1)
    x = torch.ones(8, 3, dtype=torch.float64)
    pipe.zero_grad()
    if schedule == "call":
        torch.autograd.backward(mean(pipe(x), None))
    else:
        pipe.forward_backward(x, loss_fn=mean, schedule=schedule)
    return grads_of(pipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
def test_each_partition_recomputes_by_its_mode(kind: str, schedule: str) -> None:
    module = layers()
    with piped(kind, module, MODES) as pipe:
        assert pipe.checkpoint == tuple(MODES)
        with pipe.record() as timeline:
            found = step(pipe, schedule)
        pipe.checkpoint = "never"
        expected = step(pipe, schedule)
    same(found, expected, rtol=0, atol=0)
    recomputed = Counter(e.partition for e in timeline.events if e.kind == "recomputation")
    assert recomputed == {0: 4, 2: 3}


def test_one_mode_for_all_is_that_mode() -> None:
    with piped("Pipe", layers(), ["never"] * 3) as pipe:
        assert pipe.checkpoint == "never"
        pipe.checkpoint = ("always", "never", "never")
        assert pipe.checkpoint == ("always", "never", "never")
        assert "checkpoint=('always', 'never', 'never')" in repr(pipe)


@pytest.mark.parametrize("kind", ["Pipe", "pipeline"])
@pytest.mark.parametrize("modes", [[], ["never"], ["never"] * 4, ["never", "often", "never"]])
def test_a_list_that_does_not_fit_is_refused(modes: list[str], kind: str) -> None:
    with pytest.raises(ValueError, match="for each of 3 partitions"):
        piped(kind, layers(), modes)
    with piped(kind, layers(), "never") as pipe:
        with pytest.raises(ValueError, match="for each of 3 partitions"):
            pipe.checkpoint = modes
        assert pipe.checkpoint == "never"
