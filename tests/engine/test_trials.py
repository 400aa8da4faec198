"""Tests trials: when a pipe's runs are tried the other way, and what changes its way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.engine import trials
from pipert.engine.trials import Trial, Trials
from pipert.queues.interpreter import ONE_THREAD_AT_A_TIME
from pipert.schedules.plan import Plan, plan, plan_call


def ways(trial: Trial, runs: int, seconds: Callable[[bool], float]) -> list[bool]:
    """Does ``runs`` runs that take ``seconds(in_turn)``; returns which had turns."""
    done = []
    for _ in range(runs):
        in_turn = trial.next_in_turn()
        trial.took(seconds(in_turn), in_turn)
        done.append(in_turn)
    return done


@pytest.mark.parametrize("begins_in_turn", [False, True])
@pytest.mark.parametrize("faster_in_turn", [False, True])
def test_a_pipe_comes_to_the_faster_way(begins_in_turn: bool, faster_in_turn: bool) -> None:
    done = ways(Trial(begins_in_turn), 400, lambda in_turn: 2.0 - (in_turn == faster_in_turn))
    assert done[:3] == [begins_in_turn] * 3
    assert done[30:].count(faster_in_turn) >= 355


def test_a_slower_way_is_tried_more_and_more_seldom_but_for_ever() -> None:
    done = ways(Trial(False), 2000, lambda in_turn: 2.0 if in_turn else 1.0)
    tried = [k for k, in_turn in enumerate(done) if in_turn]
    apart = [later - earlier for earlier, later in zip(tried, tried[1:], strict=False)]
    assert apart[0] < 10 and max(apart[:2]) < min(apart[4:])
    assert all(trials._MOST + 2 <= runs < 2 * trials._MOST + 2 for runs in apart[-5:])


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("period", range(2, 7))
def test_what_recurs_in_a_training_loop_changes_nothing(period: int, first: int) -> None:
    """As a run after each step of the optimizer does, which may take longer."""
    trial, number = Trial(True), itertools.count(first)
    ways(trial, 500, lambda _: 1.0 if next(number) % period else 1.5)
    assert trial.in_turn


def test_one_slow_run_changes_nothing() -> None:
    trial = Trial(False)
    disturbed = iter([1.0] * 2 + [9.0] + [1.0] * 60)  # the one right before the first trial
    ways(trial, 60, lambda in_turn: next(disturbed) * (1.2 if in_turn else 1.0))
    assert not trial.in_turn


def test_a_way_that_is_faster_by_chance_as_often_as_slower_is_not_taken() -> None:
    """Also if it is faster several times in a row."""
    trial, chance = Trial(False), itertools.cycle([0.5] * 4 + [2.0] * 4)
    ways(trial, 500, lambda in_turn: next(chance) if in_turn else 1.0)
    assert not trial.in_turn


def test_a_pipe_notices_when_the_other_way_becomes_faster() -> None:
    trial = Trial(False)
    ways(trial, 500, lambda in_turn: 2.0 if in_turn else 1.0)
    assert not trial.in_turn
    ways(trial, 100, lambda in_turn: 1.0 if in_turn else 2.0)
    assert trial.in_turn


def test_a_machine_that_gets_slower_and_slower_changes_nothing() -> None:
    trial, now = Trial(True), 1.0

    def seconds(in_turn: bool) -> float:
        nonlocal now
        now *= 1.05
        return now if in_turn else 1.1 * now

    ways(trial, 100, seconds)
    assert trial.in_turn


def test_ways_that_take_the_same_time_end_with_turns_which_take_less_cpu_time() -> None:
    trial = Trial(False)
    ways(trial, 50, lambda _: 1.0)
    assert trial.in_turn


def test_a_trial_that_fails_is_made_again() -> None:
    trial = Trial(False)
    ways(trial, 3, lambda _: 1.0)
    assert trial.next_in_turn()  # and it never says how long it took
    assert trial.next_in_turn()


@pytest.mark.skipif(not ONE_THREAD_AT_A_TIME, reason="threads execute Python in parallel")
@pytest.mark.parametrize(
    ("tried", "begins"),
    [
        (plan("1f1b", 4, 2), True),
        (plan("gpipe", 4, 2), False),
        (plan_call(4, 2, (0, 1)), False),
        (plan_call(1, 2, (0, 1)), None),
        (plan_call(4, 1, (0,)), None),
        (plan_call(4, 2, (0, 0)), None),
    ],
)
def test_trials_are_made_where_workers_may_be_in_each_others_way(
    tried: Plan, begins: bool | None
) -> None:
    trial = Trials().of(tried)
    assert (None if trial is None else trial.in_turn) == begins


def test_threads_that_all_execute_python_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ONE_THREAD_AT_A_TIME", False)
    assert Trials().of(plan("1f1b", 4, 2)) is None


@pytest.mark.skipif(not ONE_THREAD_AT_A_TIME, reason="threads execute Python in parallel")
def test_each_kind_of_run_has_a_trial_of_its_own() -> None:
    of = Trials().of
    call = plan_call(4, 2, (0, 1))
    assert of(call) is of(plan_call(4, 2, (0, 1)))
    assert len({id(of(p)) for p in (call, plan("gpipe", 4, 2), plan("1f1b", 4, 2))}) == 3
    with torch.no_grad():
        without = of(call)
    assert without is not of(call)


@pytest.mark.skipif(not ONE_THREAD_AT_A_TIME, reason="threads execute Python in parallel")
def test_a_pipe_makes_trials_and_what_it_computes_stays_the_same() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))
    x = torch.rand(8, 2)
    begun: list[bool] = []

    def loss_fn(y: Tensor, _: Any) -> Tensor:
        return y.sum()

    class Noted(Trial):
        __slots__ = ()

        def took(self, seconds: float, in_turn: bool) -> None:
            begun.append(in_turn)
            super().took(seconds, in_turn)

    with Pipe(layers, [2, 1], devices=["cpu"] * 2, chunks=4) as pipe:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trials, "Trial", Noted)
            gradients = list[list[Tensor]]()
            for _ in range(8):
                torch.manual_seed(1)
                pipe.zero_grad()
                pipe.forward_backward(x, loss_fn=loss_fn, schedule="1f1b")
                gradients.append([p.grad for p in pipe.parameters() if p.grad is not None])
    assert begun[:3] == [True] * 3 and False in begun
    assert len(gradients[0]) == 4
    for later in gradients[1:]:
        assert all(map(torch.equal, gradients[0], later))
