"""Tests schedules that are fitted to a recording."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pipert import Pipe, Timeline
from pipert.observe.event import Event
from pipert.schedules import plan
from pipert.timeline import Fitted
from tests.contract.ways import MODES, grads_of, linear, mean, same


def timeline(seconds: list[tuple[float, float, float]], copying: float = 0.0, m: int = 4) -> Any:
    """Makes the recording of a step in which each partition's F, B, W take these seconds."""
    events, device = [], torch.device("cpu")
    for j, times in enumerate(seconds):
        kinds = ("forward", "backward", "weight gradient")
        for kind, length in zip(kinds, times, strict=True):
            events += [Event(kind, i, j, device, 0.0, length) for i in range(m)]
        if copying and j:
            events.append(Event("copy", 0, j, device, 0.0, copying, origin=j - 1))
            events.append(Event("copy", 0, j - 1, device, 0.0, copying, origin=j))
    return Timeline(events, ["cpu"] * len(seconds), steps=[0])


EQUAL = [(1.0, 1.0, 1.0)] * 4


def predicted(fitted: Fitted) -> dict[str, float]:
    return {each.name: each.seconds for each in fitted.predictions}


def test_predictions_of_equal_partitions_are_those_of_the_formulas() -> None:
    found = predicted(timeline(EQUAL, m=8).fit())
    assert found["1f1b"] == 3 * (8 + 3)
    assert found["zb-h2"] == 3 * 8 + 3  # only the fill is left
    assert found["fitted"] <= min(found.values())


@pytest.mark.parametrize("memory", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    "seconds", [EQUAL, [(3.0, 2.0, 4.0), (1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 5.0, 5.0)]]
)
@pytest.mark.parametrize("copying", [0.0, 0.7])
def test_no_device_keeps_more_than_is_allowed_and_more_is_not_slower(
    seconds: list[tuple[float, float, float]], memory: int, copying: float
) -> None:
    less, more = (timeline(seconds, copying).fit(memory=k) for k in (memory, memory + 1))
    assert max(less.predictions[0].kept) <= memory
    assert predicted(more)["fitted"] <= predicted(less)["fitted"]
    assert predicted(less)["fitted"] == min(predicted(less).values())


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_the_schedule_takes_any_number_of_micro_batches(m: int, placement: tuple[int, ...]) -> None:
    recorded = timeline(EQUAL)
    fitted = Timeline(recorded.events, ["cpu"] * 4, workers=placement, steps=[0]).fit()
    made = plan(fitted, m, 4, placement)  # checks the rules
    assert len(made) == m * 4 * 3  # F, B and W


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_fitted_step_is_that_of_1f1b(checkpoint: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(linear(3, 3), nn.Tanh(), linear(3, 3), linear(3, 3))
    x = torch.randn(8, 3, dtype=torch.float64)
    with Pipe(layers, [2, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint) as pipe:
        pipe.forward_backward(x, loss_fn=mean)
        expected = grads_of(layers)
        layers.zero_grad()
        with pipe.record() as recording:
            pipe.forward_backward(x, loss_fn=mean, schedule="zb-h1")
        layers.zero_grad()
        pipe.forward_backward(x, loss_fn=mean, schedule=recording.fit(memory=2))
    same(grads_of(layers), expected, rtol=1e-12, atol=1e-12)


def test_only_steps_that_put_gradients_off_count() -> None:
    recorded, device = timeline(EQUAL, m=8), torch.device("cpu")
    others = [
        Event(kind, i, j, device, 0.0, 9.0, run=run)
        for kind in ("forward", "backward")
        for i in range(8)
        for j in range(4)
        for run in (1, 2)
    ]
    failed = Event("weight gradient", 0, 0, device, 0.0, 9.0, run=2)
    devices, steps = ["cpu"] * 4, [0, 1, 2]
    mixed = Timeline([*recorded.events, *others, failed], devices, steps=steps, failed=[2])
    assert predicted(mixed.fit()) == predicted(recorded.fit())
    with pytest.raises(ValueError, match="no gradients of weights that were put off"):
        Timeline([*others, failed], devices, steps=[1, 2], failed=[2]).fit()


def test_a_fitted_schedule_can_be_pickled() -> None:
    fitted = timeline(EQUAL).fit()
    assert str(pickle.loads(pickle.dumps(fitted))) == str(fitted)


def test_it_prints_what_it_predicts() -> None:
    lines = str(timeline(EQUAL, m=8).fit(memory=4)).splitlines()
    assert [line.split()[0] for line in lines] == ["predicted", "fitted", "1f1b", "zb-h1"]
    assert lines[2] == "1f1b         33000.000  4, 3, 2, 1"


def test_what_cannot_be_fitted_is_refused() -> None:
    recorded = timeline(EQUAL)
    without = [event for event in recorded.events if event.kind != "weight gradient"]
    with pytest.raises(ValueError, match="no gradients of weights that were put off; record"):
        Timeline(without, ["cpu"] * 4, steps=[0]).fit()
    with pytest.raises(TypeError, match="memory must be an int, got 2.5"):
        recorded.fit(memory=2.5)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        recorded.fit(memory=0)
    with pytest.raises(ValueError, match="fitted to partitions on the workers"):
        plan(recorded.fit(), 4, 4, (0, 0, 1, 1))
