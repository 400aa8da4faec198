"""Waits until a run has noted a failure, which a layer cannot observe."""

from __future__ import annotations

import threading

import pytest

from pipert.stage.run import Outcome

__all__ = ["Failures"]

TIMEOUT = 20.0  # s


class Failures:
    """A counter of the failures that runs have noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._noted = threading.Semaphore(0)
        fail = Outcome.fail

        def fail_and_count(outcome: Outcome, position: int, error: BaseException) -> None:
            fail(outcome, position, error)
            self._noted.release()

        monkeypatch.setattr(Outcome, "fail", fail_and_count)

    def wait(self) -> None:
        assert self._noted.acquire(timeout=TIMEOUT), "nothing failed"
