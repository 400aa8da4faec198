"""Tells counters, observers, recordings and profilers what a pipe does, and reports it.

``run_trace`` tells, ``timeline`` is the user's object, ``report`` summarises it.
"""

from __future__ import annotations

from pipert.observe.report import DeviceTimes, Report

__all__ = ["DeviceTimes", "Report"]
