"""Tests that long measurements show progress, and only where a person can see it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipert import pipeline, plan_for
from pipert.balance import balance_by_time

X = torch.ones(4, 4)


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def any_model() -> nn.Module:
    model = nn.ModuleDict({"layers": layers()})
    model.forward = lambda x: model["layers"](x)
    return model


WORK: dict[str, tuple[Callable[[], Any], str]] = {
    "balance_by_time": (lambda: balance_by_time(2, layers(), X), "measuring layers"),
    "partitions": (
        lambda: pipeline(any_model(), partitions=2, example=X, devices=["cpu"] * 2).close(),
        "measuring 4 blocks for 2 partitions",
    ),
    "plan_for any model": (
        lambda: plan_for(any_model(), X, memory="1GiB", devices=["cpu"] * 2, chunks=[2, 4]),
        "chunks=4 of [2, 4]",
    ),
}


@pytest.mark.usefixtures("one_measurement")
@pytest.mark.parametrize("work", WORK)
def test_progress_is_shown_on_a_terminal_alone(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    do, told = WORK[work]
    for screen in (Screen(True), Screen(False)):
        monkeypatch.setattr(sys, "stderr", screen)
        do()
        assert (told in screen.getvalue()) == screen.isatty()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    do()
    assert not screen.getvalue()
