"""Tests the promises of a step's schedule, for any numbers and any placement."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipert.schedules import Action, Plan, plan
from pipert.schedules.plan import plan_call

NAMES = ["call", "gpipe", "1f1b", "eager-1f1b", "interleaved", "zb", "zb-h1", "zb-h2"]


@st.composite
def schedules(draw: st.DrawFn) -> Plan:
    """Of each kind, over workers that serve any partitions."""
    m, n = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    workers = draw(st.integers(1, n))
    placement = draw(st.lists(st.integers(0, workers - 1), min_size=n, max_size=n))
    name = draw(st.sampled_from(NAMES))
    if name == "interleaved":
        placement = [j % workers for j in range(n)]
    recomputed = draw(st.lists(st.integers(0, m), min_size=n, max_size=n))
    if name == "call":
        return plan_call(m, n, placement, recomputed)
    return plan(name, m, n, placement, recomputed)


@given(schedules())
def test_each_action_is_there_once(schedule: Plan) -> None:
    kinds = ["F", "B"] if schedule.goes_back else ["F"]
    if "W" in schedule.occurring_kinds:
        kinds.append("W")
    every = [(i, j) for i in range(schedule.m) for j in range(schedule.n)]
    expected = {Action(kind, i, j) for kind in kinds for i, j in every}
    if schedule.goes_back:
        expected |= {Action("R", i, j) for i, j in every if i < schedule.recomputed[j]}
    assert len(schedule) == len(expected)
    assert set(schedule) == expected


@given(schedules())
def test_an_action_comes_after_the_actions_it_needs(schedule: Plan) -> None:
    tick_of = {action: k for k, tick in enumerate(schedule.ticks) for action in tick}
    for action in schedule:
        assert all(tick_of[needed] < tick_of[action] for needed in schedule.needs(action))


@given(schedules())
def test_a_worker_has_one_action_in_a_tick(schedule: Plan) -> None:
    for tick in schedule.ticks:
        workers = [schedule.placement[action.j] for action in tick]
        assert len(set(workers)) == len(workers)


@settings(max_examples=30)
@given(schedules(), st.data())
def test_workers_that_take_their_actions_in_order_never_wait_in_a_circle(
    schedule: Plan, data: st.DataObject
) -> None:
    """This holds whatever the threads' timing."""
    queues: dict[int, deque[Action]] = {worker: deque() for worker in schedule.placement}
    for action in schedule:
        queues[schedule.placement[action.j]].append(action)
    done: set[Action] = set()
    while len(done) < len(schedule):
        ready = [q for q in queues.values() if q and done.issuperset(schedule.needs(q[0]))]
        assert ready, f"every worker waits: {[queue[0] for queue in queues.values() if queue]}"
        done.add(data.draw(st.sampled_from(ready)).popleft())


@given(schedules())
def test_neighbours_take_the_micro_batches_in_one_order(schedule: Plan) -> None:
    """Values and gradients go from one partition to the next through queues."""
    for kind in "FB":
        orders = [
            [action.i for action in schedule if (action.kind, action.j) == (kind, j)]
            for j in range(schedule.n)
        ]
        assert orders == orders[:1] * schedule.n


@pytest.mark.parametrize("name", ["1f1b", "eager-1f1b"])
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_no_more_micro_batches_are_kept_than_is_promised(
    name: str, m: int, n: int, data: st.DataObject
) -> None:
    placement = data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    alive = [0] * n
    for kind, _, j in plan(name, m, n, placement, data.draw(st.integers(0, m))):
        alive[j] += {"F": 1, "R": 0, "B": -1}[kind]
        assert alive[j] <= min(m, n - j if name == "1f1b" else 2 * (n - j) - 1)


@pytest.mark.parametrize(("name", "most"), [("zb-h1", 1), ("zb-h2", 2)])
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_no_more_is_kept_until_its_weights_gradients_are_computed(
    name: str, most: int, m: int, n: int, data: st.DataObject
) -> None:
    placement = data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n))
    alive, d = dict.fromkeys(placement, 0), len(set(placement))
    for kind, _, j in plan(name, m, n, placement, data.draw(st.integers(0, m))):
        worker = placement[j]
        alive[worker] += {"F": 1, "R": 0, "B": 0, "W": -1}[kind]
        assert alive[worker] <= (most * (d - 1) + 1) * placement.count(worker)


@given(schedules())
def test_the_grid_shows_each_action_in_the_row_of_its_worker_and_the_column_of_its_tick(
    schedule: Plan,
) -> None:
    head, *rows = str(schedule).splitlines()
    assert head.split() == ["tick", *map(str, range(len(schedule.ticks)))]
    by_worker = {int(row.split()[0].removeprefix("w=")): row for row in rows}
    for k, tick in enumerate(schedule.ticks):
        for action in tick:
            place = by_worker[schedule.placement[action.j]].index(str(action))
            assert head[place:].split()[0] == str(k)
