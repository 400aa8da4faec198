"""Threads: what runs tasks, under whose context, and how it ends. Knows no pipelines.

``context`` is what a task takes over from its caller's thread, ``turn`` keeps short tasks from
fighting over the interpreter, ``worker`` is the thread's loop, ``pool`` starts and ends the
threads.
"""

from __future__ import annotations

__all__: list[str] = []
