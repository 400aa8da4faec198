"""Provides an observer that keeps all events."""

from __future__ import annotations

import threading
from typing import Any

from pipert import Observer, RunInfo, TaskInfo

__all__ = ["Log"]


class Log(Observer):
    """An observer that notes all events, and the thread of each."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.threads: list[tuple[str, threading.Thread]] = []

    def note(self, event: str, *what: Any) -> None:
        self.events.append((event, *what))
        self.threads.append((event, threading.current_thread()))

    def run_started(self, run: RunInfo) -> None:
        self.note("run_started", run)

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        assert seconds >= 0
        self.note("run_finished", run, outcome)

    def task_started(self, task: TaskInfo) -> None:
        self.note("task_started", task)

    def task_finished(self, task: TaskInfo, seconds: float) -> None:
        assert seconds >= 0
        self.note("task_finished", task)

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        self.note("failed", task, type(error))

    def of(self, event: str) -> list[Any]:
        return [what if len(what) > 1 else what[0] for name, *what in self.events if name == event]
