"""Timelines: what the devices of a pipe did and when, and how to improve it.

``timeline`` is the user's object, ``report`` summarises it with ``advice``, ``chrome`` and
``picture`` draw it.
"""

from __future__ import annotations

from pipert.timeline.advice import Advice, Costs
from pipert.timeline.report import DeviceTimes, Report

__all__ = ["Advice", "Costs", "DeviceTimes", "Report"]
