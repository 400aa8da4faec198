"""The clock: posts the tasks of a run to the in-queues, diagonal by diagonal (section 3.2.1).

It fixes the total order and does not wait for a diagonal to finish: a worker starts ``F[i,j]`` the
moment its input is there. It is a thread of its own, so that runs of several callers are posted
whole, one after the other, and overlap in the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipert.stage.lane import Lane
from pipert.workers.activity import Seat
from pipert.workers.worker import Task

__all__: list[str] = []


class LaneTask:
    """A task of one run, as a worker takes it."""

    __slots__ = ("_due", "_lane", "_task")

    def __init__(self, lane: Lane, task: Any) -> None:
        self._lane = lane
        self._task = task
        self._due = [lane.progress]  # emptied by whoever settles the task; pop() is atomic

    def run(self, seat: Seat) -> None:
        self._lane.perform(self._task, seat)
        self._due.pop().settle()

    def abandon(self, error: BaseException) -> None:
        try:
            progress = self._due.pop()
        except IndexError:
            return  # its run was broken off after it was settled
        self._lane.abandon(self._task, error)
        progress.settle()

    def __repr__(self) -> str:
        return f"<LaneTask {self._task}>"


class Posting:
    """Posts one run; the clock's task. Posts or abandons it once, however often it is put.

    Args:
        lanes: the run's, one for each partition.
        workers: the worker of each partition.
        put: hands a task to a worker, or abandons it.
    """

    __slots__ = ("_claim", "_put", "_workers", "is_done", "lanes")

    def __init__(
        self, lanes: Sequence[Lane], workers: Sequence[int], put: Callable[[int, Task], None]
    ) -> None:
        self.lanes = lanes
        self.is_done = False  # whether all tasks are posted
        self._workers = workers
        self._put = put
        self._claim = [True]  # emptied by whoever posts or abandons the run; pop() is atomic

    def run(self, seat: Seat) -> None:
        if self._is_first():
            put, lanes, workers = self._put, self.lanes, self._workers
            for task in lanes[0].progress.schedule:
                put(workers[task.j], LaneTask(lanes[task.j], task))
            self.is_done = True

    def abandon(self, error: BaseException) -> None:
        if self._is_first():
            for task in self.lanes[0].progress.schedule:
                LaneTask(self.lanes[task.j], task).abandon(error)
            self.is_done = True

    def _is_first(self) -> bool:
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def __repr__(self) -> str:
        return f"<Posting of {self.lanes[0].progress!r}>"
