"""Tests what others see of a worker's activity."""

from __future__ import annotations

from typing import Any

import pytest

from pipert.workers import activity as activity_module
from pipert.workers.activity import Activity, State


def test_busy_seconds_never_fall_for_readers_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One reads later, and is done, while another has computed and not noted it yet."""
    activity, state = Activity(), State(0, 0.0, "F[0,0]", since=0.0, works=True)
    calls, later = iter(range(10)), list[float]()

    def interrupted(*values: float) -> float:
        found = max(values)
        if next(calls) == 1:  # the second: what has been seen before
            later.append(activity.busy_by(state, 6.0))
        return found

    names: Any = vars(activity_module)
    monkeypatch.setitem(names, "max", interrupted)
    first = activity.busy_by(state, 5.0)
    assert [first, *later] == [5.0, 6.0]
    assert activity.busy_by(state, 5.5) == 6.0  # its worker has ended the task meanwhile
