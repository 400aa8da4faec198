"""Shows what the devices of a pipe did and when, and how to make the pipe faster.

``timeline`` is the user's object, ``report`` summarises it and adds ``advice``, ``chrome`` and
``picture`` draw it.
"""

from __future__ import annotations

from pipert.timeline.advice import Advice, Costs
from pipert.timeline.report import DeviceTimes, Report

__all__ = ["Advice", "Costs", "DeviceTimes", "Report"]
