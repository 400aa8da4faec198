"""The interpreter's lock: whether there is one."""

from __future__ import annotations

import sys

__all__: list[str] = []

ONE_THREAD_AT_A_TIME: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether one thread executes Python at a time: not on free-threaded builds."""
