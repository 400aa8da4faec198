"""Tests balances from times, by a clock that the layers advance and by a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.balance import balance_by_time, layer_times, measure
from tests.helpers.virtual_clock import CLOCK, Clock, spend

EXTRA: list[float] = []
"""What each disturbed call takes beyond its time."""


class Takes(nn.Module):
    """A layer that takes so many seconds, and more in each copy's first call and when disturbed."""

    def __init__(self, forward: float, backward: float, disturbed: bool = False) -> None:
        super().__init__()
        self.takes = forward, backward
        self.disturbed = disturbed
        self.cold = True

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = self.takes
        if self.cold:
            forward += 100.0
            self.cold = False
        elif self.disturbed:
            forward += EXTRA.pop(0) if EXTRA else 0.0
        return spend(x, forward, backward)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(measure, "perf_counter", CLOCK)
    CLOCK.now = 0.0
    EXTRA.clear()
    return CLOCK


SAMPLE = torch.ones(2, requires_grad=True)


def test_a_time_is_that_of_forward_and_backward(clock: Clock) -> None:
    module = nn.Sequential(Takes(1, 2), Takes(0.5, 0), Takes(4, 8))
    assert layer_times(module, SAMPLE, timeout=0) == [3, 0.5, 12]


def test_a_layer_that_works_in_place_goes_backward(clock: Clock) -> None:
    """Its gradient is that of what it got, not of what it left there."""

    class InPlace(Takes):
        def forward(self, x: Tensor) -> Tensor:
            x.copy_(super().forward(x))
            return x

    module = nn.Sequential(Takes(1, 2), InPlace(4, 8))
    assert layer_times(module, SAMPLE, timeout=0) == [3, 12]


def test_pitfall_33_the_first_run_of_a_layer_does_not_count(clock: Clock) -> None:
    module = nn.Sequential(Takes(1, 0), Takes(2, 0))
    assert layer_times(module, SAMPLE, timeout=0) == [1, 2]


def test_a_minority_of_disturbed_rounds_does_not_count(clock: Clock) -> None:
    EXTRA[:] = [0, 50, 0, 50, 0]
    module = nn.Sequential(Takes(1, 1), Takes(2, 1, disturbed=True))
    assert layer_times(module, SAMPLE, timeout=1000) == [2, 3]
    assert not EXTRA


def test_equal_layers_take_as_long_as_the_first_of_them(clock: Clock) -> None:
    layers = Takes(1, 1, disturbed=True), Takes(2, 1), Takes(1, 1, disturbed=True)
    EXTRA[:] = [0, 50]
    assert layer_times(nn.Sequential(*layers), SAMPLE, timeout=0) == [2, 3, 2]


def test_layers_are_measured_round_by_round_until_the_time_is_over(clock: Clock) -> None:
    calls = []

    class Noting(Takes):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.takes[0])
            return super().forward(x)

    # A round of both takes 2 * (100 + 3 + 3) s.
    layer_times(nn.Sequential(Noting(1, 2), Noting(2, 1)), SAMPLE, timeout=213)
    assert calls == [1, 1, 2, 2] * 2


def test_the_balance_is_the_best_for_the_times(clock: Clock) -> None:
    module = nn.Sequential(*[Takes(t, t) for t in (1, 1, 1, 5, 2, 2, 1)])
    assert balance_by_time(3, module, SAMPLE, timeout=0) == [3, 1, 3]


@pytest.mark.slow
def test_the_same_model_has_the_same_balance_each_time() -> None:
    """How steady real times are: a tenfold difference between layers is never mistaken.

    Repeated medians of a layer differ by some 15 per cent (benchmarks/README.md). Here nothing is
    assumed about the machine but that noise does not cover a factor of ten.
    """
    small, large = nn.Linear(16, 16), nn.Linear(1024, 1024)
    fit, unfit = nn.Linear(16, 1024), nn.Linear(1024, 16)
    module = nn.Sequential(small, small, small, fit, large, large, large, unfit, small, small)
    example = torch.ones(256, 16)
    balances = [balance_by_time(2, module, example, timeout=1.0) for _ in range(3)]
    # The middle one of the three large layers goes left or right: both halves are as good.
    assert all(balance in ([5, 5], [6, 4]) for balance in balances)


@pytest.mark.cuda
def test_a_gpu_is_idle_when_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    synchronize: Any = torch.cuda.synchronize

    def wait(device: torch.device) -> None:
        synchronize(device)
        log.append(f"{device} is idle")

    def clock() -> float:
        log.append("read")
        return 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(measure, "perf_counter", clock)
    layer_times(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), timeout=0)
    # A forward and a backward, twice, and code before and behind, each from idle to idle; and the
    # time that is left.
    assert log == ["read", *["cuda:0 is idle", "read"] * 12, "read"]
