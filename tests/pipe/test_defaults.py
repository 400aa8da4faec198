"""Tests what a pipe is by default, and that the same words mean the same in all functions."""

from __future__ import annotations

from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert import balance, pipeline, plan_for

CPUS = ["cpu", "cpu"]
X = torch.ones(8, 4)


class Chain(nn.Module):
    """Calls layers one after the other, and notes the rows that it gets."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(layers)])
        self.rows = set[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add(len(x))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _one_measurement(one_measurement: None) -> None:
    """Measures no longer than it takes."""


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize("how", [{}, {"partitions": "auto"}], ids=["left-out", "auto"])
@pytest.mark.parametrize("given", [None, ["cpu"], ["cpu"] * 3])
def test_there_is_a_partition_for_each_device(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], given: Any
) -> None:
    without_gpus(monkeypatch)
    with pipeline(Chain(), example=X, devices=given, **how) as pipe:
        assert len(pipe.partitions) == (2 if given is None else len(given))
        assert torch.equal(pipe(X), pipe.module(X))


@pytest.mark.cuda
def test_there_is_a_partition_for_each_gpu() -> None:
    n = torch.cuda.device_count()
    with pipeline(Chain(n), example=X.cuda()) as pipe:
        assert [device.index for device in pipe.devices] == [*range(n)]


@pytest.mark.parametrize("how", [{}, {"partitions": 3}, {"partitions": "auto"}])
def test_a_model_is_not_cut_without_an_example(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give example, .*, or cuts") as caught:
        pipeline(Chain(), devices=CPUS, **how)
    assert str(3 if how.get("partitions") == 3 else 2) in str(caught.value)


def test_a_plan_is_for_two_workers_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    found = plan_for(Chain(), X, memory="1GiB", chunks=[2])
    assert {*found[0].devices} == {"cpu:0", "cpu:1"}


def test_an_example_is_a_mini_batch_everywhere() -> None:
    model = Chain()
    hows: list[dict[str, Any]] = [{"partitions": 2}, {"cuts": ["layers.1"]}]
    for how in hows:
        with pipeline(model, **how, example=X, chunks=2, devices=CPUS):
            assert model.rows == {4}
        model.rows.clear()
    plan_for(model, X, memory="1GiB", chunks=[2], devices=CPUS)
    assert model.rows == {4}
    rows = set[int]()
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].register_forward_hook(lambda _, args, __: rows.add(len(args[0])))
    balance.balance_by_time(2, layers, X, chunks=2, timeout=0)
    balance.balance_by_size(2, layers, X, chunks=2)
    assert rows == {4}


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def recorded(pipe: Any, **how: Any) -> list[str]:
    """The order of the tasks of the first worker in a step."""
    with pipe.record() as timeline:
        pipe.forward_backward(X, loss_fn=lambda y, _: y.sum(), **how)
    kinds = [event.kind for event in timeline.events if event.partition == 0]
    return [kind for kind in kinds if kind in ("forward", "backward")]


@pytest.mark.parametrize("make", [
    lambda **how: pipert.Pipe(layers(), [2, 2], devices=CPUS, chunks=4, **how),
    lambda **how: pipeline(Chain(), ["layers.2"], devices=CPUS, chunks=4, **how),
], ids=["Pipe", "pipeline"])  # fmt: skip
def test_a_schedule_is_that_of_all_steps(make: Any) -> None:
    with make(schedule="gpipe", checkpoint="never") as pipe:
        fill_and_drain = ["forward"] * 4 + ["backward"] * 4
        assert pipe.schedule == "gpipe" and recorded(pipe) == fill_and_drain
        assert recorded(pipe, schedule="1f1b") != fill_and_drain
        pipe.schedule = "1f1b"
        assert recorded(pipe) != fill_and_drain
        with pytest.raises(ValueError, match="schedule must be one of"):
            pipe.schedule = "2f2b"
        assert pipe.schedule == "1f1b"
    with pytest.raises(ValueError, match="schedule must be one of"):
        make(schedule="2f2b")


def step(pipe: Any, x: Tensor = X, **how: Any) -> None:
    pipe.forward_backward(x, loss_fn=lambda y, _: y.sum(), **how)


def test_one_chunk_is_said_once() -> None:
    with pipert.Pipe(layers(), [2, 2], devices=CPUS) as pipe:
        with TestCase().assertLogs("pipert") as logged:
            for _ in range(2):
                step(pipe)
    (said,) = logged.output
    assert "chunks=1: of 2 partitions one computes at a time" in said
