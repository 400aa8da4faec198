"""Tests on CPU workers that each check holds for pipert, and fails with an injected fault."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Event, Timeline
from pipert.check import errors
from pipert.check import load as loads
from pipert.check import overlap, repeats, speed, values
from pipert.check.finding import BROKEN, HOLDS, NOT_CHECKED, REPORTED, Finding
from pipert.check.load import LONG_ENOUGH, Load, busy
from pipert.check.models import small_models
from pipert.check.values import difference
from pipert.check.ways import Devices, Trial, even
from pipert.layers.call import Layers
from pipert.layers.place import Place
from pipert.stage.gradients import Gradients

TWO = Devices((torch.device("cpu"),) * 2)
LOAD = Load(2, 4, layers=1, width=8, rows=4)


def change_gradients(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the gradients of a step be something else."""
    take = Gradients.take

    def changed(self: Gradients) -> list[tuple[Tensor, Tensor]]:
        return [(weight, change(gradient)) for weight, gradient in take(self)]

    monkeypatch.setattr(Gradients, "take", changed)


def outcomes(rows: Sequence[Finding]) -> list[str]:
    return [row.outcome for row in rows]


@pytest.mark.slow
def test_values_hold() -> None:
    models = [*small_models(2, torch.float64), *small_models(2, torch.float32)]
    assert outcomes([*values.check(TWO, models)]) == [HOLDS] * 6


@pytest.mark.slow
def test_a_gradient_that_is_wrong_by_a_millionth_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    change_gradients(monkeypatch, lambda gradient: gradient * (1 + 1e-6))
    found = [*values.check(TWO, small_models(2, torch.float64))]
    assert outcomes(found) == [BROKEN] * 3
    assert "gpipe, checkpoint='never': the gradient of " in found[0].seen
    assert "differs by 1.0e-06 of its largest entry" in found[0].seen
    assert "loss.backward()" not in found[0].seen  # does not go that way


def test_values_under_load_hold() -> None:
    (found,) = values.check(TWO, [LOAD.model("chain under load")])
    assert found.outcome == HOLDS


@pytest.mark.slow
def test_repeated_steps_hold() -> None:
    assert outcomes([*repeats.check(TWO, 2, LOAD)]) == [HOLDS] * 2


@pytest.mark.slow
def test_a_last_bit_that_varies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    change_gradients(monkeypatch, lambda g: g * (1 + 1e-6 * next(calls)))
    found = [*repeats.check(TWO, 2, LOAD)]
    assert outcomes(found) == [BROKEN] * 2
    assert "1f1b, checkpoint='never': 3 of 3 repeats have other bits" in found[1].seen


@pytest.mark.slow
def test_bits_are_not_judged_where_a_kernel_is_not_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(*_: object, **__: object) -> tuple[Tensor, None]:
        warnings.warn("scatter does not have a deterministic implementation. More.", stacklevel=1)
        return torch.rand(()), None

    monkeypatch.setattr(Trial, "step", step)
    found = [*repeats.check(TWO, 2, LOAD)]
    assert outcomes(found) == [NOT_CHECKED] * 2
    assert found[0].seen == "scatter does not have a deterministic implementation"


def test_errors_hold() -> None:
    (found,) = errors.check(Devices((torch.device("cpu"),) * 3))
    assert found.outcome == HOLDS


def test_an_error_without_its_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "describe", lambda *_: "somewhere [0], there")
    (found,) = errors.check(TWO)
    assert found.outcome == BROKEN
    assert "an error in the backward with 1f1b: its note lacks backward, partition 1" in found.seen


def test_a_wrong_step_after_an_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    note, failed = Layers._note_of_layer, []

    def noted(*args: Any) -> str:
        failed.append(1)
        return note(*args)

    def forward(x: Tensor, *args: Any) -> Tensor:
        return linear(x, *args) + len(failed)

    linear = torch.nn.functional.linear
    monkeypatch.setattr(Layers, "_note_of_layer", noted)
    monkeypatch.setattr(torch.nn.functional, "linear", forward)
    (found,) = errors.check(TWO)
    assert found.outcome == BROKEN
    assert "an error in the forward with loss.backward(): afterwards " in found.seen


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_each_model_has_layers_for_all_partitions(n: int) -> None:
    for model in small_models(n, torch.float32):
        balance = even(len(model.layers), n)
        assert sum(balance) == len(model.layers) and min(balance) >= 1
        assert model.layers(model.x).shape[0] == len(model.x)


def test_the_balance_is_even() -> None:
    assert even(7, 3) == [3, 2, 2]


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"loss": torch.tensor(2.0), "gradient": None}, (0.0, "nothing")),
        ({"loss": torch.tensor(2.5), "gradient": None}, (0.25, "loss")),
        ({"loss": torch.tensor(float("nan")), "gradient": None}, (float("inf"), "loss")),
        ({"loss": torch.tensor([2.0]), "gradient": None}, (float("inf"), "loss")),
        ({"loss": torch.tensor(2.0), "gradient": torch.ones(())}, (float("inf"), "gradient")),
        ({"loss": torch.tensor(2.0)}, (float("inf"), "the names of ['gradient']")),
    ],
)
def test_the_largest_difference_is_named(
    found: dict[str, Tensor | None], worst: tuple[float, str]
) -> None:
    assert difference(found, {"loss": torch.tensor(2.0), "gradient": None}) == worst


def test_a_gradient_of_rounding_errors_is_compared_with_the_largest() -> None:
    expected: dict[str, Tensor | None] = {
        "gradient a": torch.tensor(1.0), "gradient b": torch.tensor(1e-17),
    }  # fmt: skip
    found = {**expected, "gradient b": torch.tensor(-1e-17)}
    assert difference(found, expected)[0] < 1e-10


# The load -----------------------------------------------------------------------------------------


def grown(monkeypatch: pytest.MonkeyPatch, seconds_of_a_row: float, m: int = 8) -> int:
    """The rows of a micro-batch, if a row takes so long."""

    def timed(devices: Devices, task: Any) -> float:
        rows: int = len(task())
        return seconds_of_a_row * rows

    monkeypatch.setattr(loads, "timed", timed)
    return busy(Load(2, m, layers=1, width=4, rows=16), TWO).rows


def test_rows_grow_until_a_task_takes_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grown(monkeypatch, LONG_ENOUGH / 100) == 128


def test_a_device_that_is_slow_gets_no_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grown(monkeypatch, 1.0) == 16


def test_the_slowest_device_has_to_be_fast_enough_for_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(devices: Devices, task: Any) -> float:
        made: Tensor = task()
        return len(made) * LONG_ENOUGH / {"cpu": 10_000, "meta": 100}[made.device.type]

    monkeypatch.setattr(loads, "timed", timed)
    two = Devices((torch.device("cpu"), torch.device("meta")))
    assert busy(Load(2, 8, layers=1, width=4, rows=16), two).rows == 128


def test_rows_do_not_grow_beyond_a_plain_step_of_two_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert grown(monkeypatch, LONG_ENOUGH / 100, m=1000) == 16


def test_a_load_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "fits", lambda self, devices: self.rows <= 5)
    load = Load(2, 8, layers=1, width=4, rows=16)
    assert loads.fitting(load, TWO) == replace(load, rows=4)


def test_the_chain_has_equal_partitions() -> None:
    layers = Load(3, 8, layers=2, width=4, rows=16).model().layers
    assert len(layers) == 6 and all(isinstance(layer, nn.Module) for layer in layers)


# What is seen in a timeline -----------------------------------------------------------------------

A, B = (torch.device("cuda", k) for k in range(2))
GPUS = Devices((A, B))


def computing(device: torch.device, start: float, end: float) -> Event:
    return Event("forward", 0, device.index, device, start, end)


def copying(start: float, end: float) -> Event:
    return Event("copy", 0, 1, B, start, end, source=A, origin=0)


def test_the_share_in_which_partitions_compute_at_once() -> None:
    timeline = Timeline([computing(A, 0, 2), computing(B, 1, 4)], [A, B])
    assert overlap._together(timeline) == pytest.approx(1 / 4)


def test_copies_are_hidden_while_the_gpu_that_they_come_from_computes() -> None:
    events = [computing(A, 0, 2), computing(B, 1, 9), copying(1.5, 4)]
    assert overlap._hidden(Timeline(events, [A, B])) == (2.5, 0.5)


@pytest.mark.parametrize(
    ("devices", "share", "task", "outcome"),
    [
        (GPUS, 0.02, 0.01, REPORTED),  # such as GPUs of different speed
        (GPUS, 0.0, 0.01, BROKEN),
        (GPUS, 0.0, 0.0001, REPORTED),  # too short to tell
        (Devices((A, A)), 0.0, 0.01, REPORTED),
        (Devices((A, B, *TWO.partitions)), 0.0, 0.01, REPORTED),
        (TWO, 0.0, 0.01, REPORTED),
    ],
)
def test_only_gpus_that_take_turns_without_need_are_a_fault(
    devices: Devices, share: float, task: float, outcome: str
) -> None:
    assert overlap._judge_together(devices, share, task, "seen").outcome == outcome


@pytest.mark.parametrize(
    ("devices", "ideal"),
    [(GPUS, "1.78"), (Devices((A, A)), "-"), (TWO, "-")],
    ids=["two GPUs", "one twice", "CPU"],
)
def test_the_ideal_is_that_of_a_device_for_each_partition(devices: Devices, ideal: str) -> None:
    load = Load(2, 8, layers=1, width=4, rows=4)
    assert speed._ideal("loss.backward(), checkpoint='never'", load, devices) == ideal
    assert speed._ideal("loss.backward(), checkpoint='always'", load, devices) == "-"
