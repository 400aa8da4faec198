"""Tests on CPU workers that each check holds for pipert, and fails with an injected fault."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipert import Event, Timeline
from pipert.check import checks
from pipert.check.checks import difference, judge_overlap
from pipert.check.ways import (
    BROKEN,
    HOLDS,
    NOT_CHECKED,
    REPORTED,
    Devices,
    Finding,
    Trial,
    chain,
    transformer,
)
from pipert.stage.gradients import Gradients

TWO = Devices((torch.device("cpu"),) * 2)
CHAIN = chain(2, 4, layers=1, width=8, rows=4, dropout=0.2)
F64 = torch.float64


def change_gradients(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the gradients of a step be something else."""
    take = Gradients.take

    def changed(self: Gradients) -> list[tuple[Tensor, Tensor]]:
        return [(weight, change(gradient)) for weight, gradient in take(self)]

    monkeypatch.setattr(Gradients, "take", changed)


def outcomes(rows: Sequence[Finding]) -> list[str]:
    return [row.outcome for row in rows]


@pytest.mark.slow
def test_a_gradient_that_is_wrong_by_a_millionth_is_noticed(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    change_gradients(monkeypatch, lambda gradient: gradient * (1 + 1e-6))
    (found,) = checks.check_values(TWO, [transformer(2, F64)])
    assert found.outcome == BROKEN
    assert "gpipe, checkpoint='never': the gradient of " in found.seen
    assert "differs by 1.0e-06 of its largest entry" in found.seen
    assert "loss.backward()" not in found.seen  # does not go that way


@pytest.mark.slow
def test_repeated_steps_hold() -> None:
    assert outcomes([*checks.check_repeats(TWO, 2, CHAIN)]) == [HOLDS] * 2


@pytest.mark.slow
def test_a_last_bit_that_varies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    change_gradients(monkeypatch, lambda g: g * (1 + 1e-6 * next(calls)))
    found = [*checks.check_repeats(TWO, 2, CHAIN)]
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
    found = [*checks.check_repeats(TWO, 2, CHAIN)]
    assert outcomes(found) == [NOT_CHECKED] * 2
    assert found[0].seen == "scatter does not have a deterministic implementation"


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_the_transformer_has_layers_for_all_partitions(n: int) -> None:
    case = transformer(n, torch.float32)
    assert len(case.layers) > n
    assert case.layers(case.x).shape == case.target.shape


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"loss": torch.tensor(2.0), "gradient": None}, (0.0, "nothing")),
        ({"loss": torch.tensor(2.5), "gradient": None}, (0.25, "loss")),
        ({"loss": torch.tensor(float("nan")), "gradient": None}, (float("inf"), "loss")),
        ({"loss": torch.tensor(2.0), "gradient": torch.ones(())}, (float("inf"), "gradient")),
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


# What is seen in a timeline -----------------------------------------------------------------------

A, B = (torch.device("cuda", k) for k in range(2))
GPUS = Devices((A, B))


def computing(device: torch.device, start: float, end: float) -> Event:
    return Event("forward", 0, device.index, device, start, end)


def copying(start: float, end: float) -> Event:
    return Event("copy", 0, 1, B, start, end, source=A, origin=0)


def test_the_share_in_which_partitions_compute_at_once() -> None:
    timeline = Timeline([computing(A, 0, 2), computing(B, 1, 4)], [A, B])
    assert checks.share_together(timeline) == pytest.approx(1 / 4)


def test_copies_are_hidden_while_the_gpu_that_they_come_from_computes() -> None:
    events = [computing(A, 0, 2), computing(B, 1, 9), copying(1.5, 4)]
    assert checks.copy_seconds(Timeline(events, [A, B])) == (2.5, 0.5)


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
    assert judge_overlap(devices, [0.0, share], task, "chain").outcome == outcome


def test_overlap_is_not_judged_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = judge_overlap(GPUS, [0.0], 0.01, "chain")
    assert found.outcome == REPORTED and "not judged: CUDA_LAUNCH_BLOCKING is set" in found.seen
