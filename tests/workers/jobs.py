"""Provides a task for workers that run without a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Job"]


class Job:
    """A task that notes its outcomes."""

    what = "a job"

    def __init__(self, body: Callable[[], object] = lambda: None) -> None:
        self.body = body
        self.outcomes: list[object] = []
        self.settled = threading.Event()

    def receive(self) -> tuple[()]:
        return ()

    def execute(self, received: object) -> None:
        self.body()

    def send(self, result: object) -> None:
        self.outcomes.append("run")
        self.settled.set()

    def abandon(self, error: BaseException) -> None:
        self.outcomes.append(type(error))
        self.settled.set()
