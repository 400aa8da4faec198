"""Tells whether the interpreter has a global lock."""

from __future__ import annotations

import sys

__all__: list[str] = []

ONE_THREAD_AT_A_TIME: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether only one thread executes Python at a time: ``False`` on free-threaded builds."""
