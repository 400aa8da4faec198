"""Tests hand-offs: who is told when, and errors that come meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert._typing import Value
from pipert.any_model.microbatch_forward import MicroBatchForward
from pipert.stage.stage import Stage
from tests.helpers.event_log import Log


def test_the_next_partition_does_not_wait_for_a_worker_to_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, waited = threading.Event(), []
    hand_off = MicroBatchForward.hand_off

    def hand_off_for_long(self: MicroBatchForward, stage: Stage) -> Any:
        value = hand_off(self, stage)
        if stage.place.j == 0:
            waited.append(begun.wait(10))
        return value

    monkeypatch.setattr(MicroBatchForward, "hand_off", hand_off_for_long)
    model = Model()
    model.second.register_forward_pre_hook(lambda *_: begun.set())
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=1) as pipe:
        pipe(torch.ones(1, 3))
    assert waited == [True]


def test_observers_see_a_partition_end_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, hand_off = Log(), MicroBatchForward.hand_off

    def hand_off_for_long(self: MicroBatchForward, stage: Stage) -> Any:
        value = hand_off(self, stage)
        if stage.place.j == 0:
            threading.Event().wait(0.1)  # the next would begin meanwhile
        return value

    monkeypatch.setattr(MicroBatchForward, "hand_off", hand_off_for_long)
    with pipert.pipeline(Model(), ["second"], devices=["cpu"] * 2, chunks=1) as pipe:
        pipe.add_observer(log)
        pipe(torch.ones(1, 3))
    told = [(name, what[0].partition) for name, *what in log.events if name.startswith("task")]
    started, finished = "task_started", "task_finished"
    assert told == [(started, 0), (finished, 0), (started, 1), (finished, 1)]


@pytest.mark.parametrize("when", ["before", "handed back"])
@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_thrown_into_a_thread_that_hands_back_is_raised(
    when: str, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_back = MicroBatchForward._hand_back

    def fail_once(self: MicroBatchForward, j: int, value: Value) -> None:
        monkeypatch.setattr(MicroBatchForward, "_hand_back", hand_back)
        if when == "handed back":
            hand_back(self, j, value)
        raise ZeroDivisionError

    monkeypatch.setattr(MicroBatchForward, "_hand_back", fail_once)
    model = Catching() if caught else Model()
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe(torch.ones(2, 3))
        assert pipe(torch.ones(2, 3)).shape == (2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Catching(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        try:
            z: Tensor = self.second(y)
        except ZeroDivisionError:
            z = self.second(y)
        return z
