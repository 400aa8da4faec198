"""Timelines: what the devices of a pipe did and when, and what to do about it.

``timeline`` is what the user holds, ``live`` how it fills, ``report`` what it says, with the
``advice`` that ``predict`` measures, ``chrome`` and ``picture`` what it looks like.
"""

from __future__ import annotations

from pipert.timeline.advice import Advice
from pipert.timeline.predict import Costs
from pipert.timeline.report import DeviceTimes, Report

__all__ = ["Advice", "Costs", "DeviceTimes", "Report"]
