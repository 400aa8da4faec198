"""Shows what the devices of a pipe did and when, and how to make the pipe faster.

``timeline`` is the user's object, ``report`` summarises it, ``picture`` draws it.
"""

from __future__ import annotations

from pipert.timeline.report import Advice, DeviceTimes, Report

__all__ = ["Advice", "DeviceTimes", "Report"]
