"""Schedules the actions of a step: which worker does which action when, as data."""

from __future__ import annotations

from pipert.schedules.action import Action
from pipert.schedules.orders import eager_one_f_one_b, gpipe, interleaved, one_f_one_b
from pipert.schedules.plan import Plan, plan

__all__ = ["Action", "Plan", "eager_one_f_one_b", "gpipe", "interleaved", "one_f_one_b", "plan"]
