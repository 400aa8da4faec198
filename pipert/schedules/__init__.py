"""Schedules the actions of a step: which worker does which action when, as data."""

from __future__ import annotations

from pipert.schedules.action import Action
from pipert.schedules.clock_cycle import gpipe
from pipert.schedules.fit import Fitted, Prediction, fit
from pipert.schedules.one_f_one_b import eager_one_f_one_b, interleaved, one_f_one_b
from pipert.schedules.plan import Plan, plan

__all__ = [
    "Action", "Fitted", "Plan", "Prediction", "eager_one_f_one_b", "fit", "gpipe", "interleaved",
    "one_f_one_b", "plan",
]  # fmt: skip
