"""Tests R3: the first of two failures in schedule order is raised, in a call and in a step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pipert.schedules import plan
from pipert.schedules.plan import plan_call
from tests.contract.ways import CALL
from tests.failures import Failures
from tests.step.test_step_errors import Steps, sum_of_squares

Task = tuple[str, int, int]

M, N = 4, 2
LETTERS = {"forward": "F", "backward": "B"}
PAIRS = [
    (("forward", 1, 0), ("forward", 0, 1), CALL),
    (("forward", 3, 0), ("forward", 0, 1), CALL),  # a fast partition has run ahead
    (("forward", 1, 0), ("backward", 0, 1), "1f1b"),
    (("forward", 2, 0), ("forward", 1, 1), "gpipe"),
    (("backward", 0, 0), ("backward", 1, 1), "1f1b"),
    (("backward", 3, 0), ("backward", 2, 1), "gpipe"),
]


@pytest.mark.parametrize("late", [0, 1], ids=["the first fails last", "the first fails first"])
@pytest.mark.parametrize(("one", "other", "schedule"), PAIRS)
def test_the_first_of_two_failures_in_schedule_order_is_raised(
    one: Task, other: Task, schedule: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = plan_call(M, N, range(N)) if schedule == CALL else plan(schedule, M, N)
    order = [str(action) for action in of]
    both = sorted((one, other), key=lambda task: order.index("%s[%d,%d]" % _named(task)))
    executing, failures = threading.Barrier(2), Failures(monkeypatch)

    def act(*task: Any) -> None:
        if task in both:
            executing.wait(20)
            if task == both[late]:
                failures.wait()
            raise ValueError(task)

    steps = Steps(act, N, M, checkpoint="never")
    with steps.pipe, pytest.raises(ValueError) as caught:
        if schedule == CALL:
            sum_of_squares(steps.pipe(steps.x), None).backward()  # type: ignore[no-untyped-call]
        else:
            steps.step(schedule)
    assert caught.value.args == (both[0],)


def _named(task: Task) -> tuple[str, int, int]:
    return LETTERS[task[0]], *task[1:]
