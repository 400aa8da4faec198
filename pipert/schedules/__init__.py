"""Schedules as data: the actions of a run and their order."""

from __future__ import annotations

from pipert.schedules.plan import (
    Action,
    StepSchedule,
    eager_one_f_one_b,
    gpipe,
    one_f_one_b,
    plan,
)

__all__ = ["Action", "StepSchedule", "eager_one_f_one_b", "gpipe", "one_f_one_b", "plan"]
