"""The loop of a worker thread.

Guarantees:

* **W1** each accepted task has one outcome: it is run, or it is abandoned with the reason. What its
  computation raises is the task's own business; an exception thrown into the thread from outside
  ends the loop, and the task at hand and all that are left are abandoned.
* **W2** an idle worker references nothing of its last task.
* **W3** a worker never references its pool: it gets a queue and values.
"""

from __future__ import annotations

import logging
import threading
import traceback
from typing import Protocol

import torch
from torch.multiprocessing import _set_thread_name

from pipert.errors import PipeClosedError, WorkerDiedError
from pipert.queues.closable import ClosableQueue, QueueClosed
from pipert.workers.activity import Activity, Seat
from pipert.workers.turn import Turn

__all__: list[str] = []

_log = logging.getLogger("pipert")


class Task(Protocol):
    """What a worker takes from its in-queue. It is run once, or abandoned."""

    def run(self, seat: Seat) -> None:
        """Do it, on the worker, and settle it whatever happens. Gives the turn up if it blocks."""

    def abandon(self, error: BaseException) -> None:
        """It never runs, or its run was broken off, because of ``error``. Settle it, if it is not
        settled yet. Called on any thread; must neither block nor raise."""


class WorkerThread(threading.Thread):
    """A daemon thread with an in-queue. Daemon, so that a layer that never returns cannot keep the
    interpreter alive; ``pool`` ends the others properly."""

    def __init__(
        self, name: str, device: torch.device, turns: threading.Lock, activity: Activity
    ) -> None:
        in_queue: ClosableQueue[Task] = ClosableQueue()
        seat = Seat(Turn(turns), activity)
        super().__init__(target=work, args=(in_queue, device, seat), name=name, daemon=True)
        self.in_queue = in_queue

    def serves(self) -> bool:
        """Whether it takes tasks: one that is about to end does not, though it is alive."""
        return self.is_alive() and not self.in_queue.is_closed()

    def stop(self) -> None:
        """Let the thread end after its current task; it abandons the others. From anywhere."""
        self.in_queue.shut()
        if not self.is_alive():
            _abandon(self.in_queue.close(), None, self.name)


def work(in_queue: ClosableQueue[Task], device: torch.device, seat: Seat) -> None:
    """Run tasks until the queue is closed."""
    name = threading.current_thread().name
    _set_thread_name(name[:15])  # what Linux takes
    task: Task | None = None
    reason: BaseException | None = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while True:
            try:
                task = in_queue.get(before_waiting=seat.turn.give_up)
            except QueueClosed:
                return
            task.run(seat)
            task = None  # W2
    except BaseException as error:  # noqa: B036  whoever waits for a task gets it
        reason = error
    finally:
        seat.turn.give_up()
        seat.activity.rests()
        left = in_queue.close()
        if task is not None:
            left.insert(0, task)
        _abandon(left, reason, name)


def _abandon(tasks: list[Task], reason: BaseException | None, name: str) -> None:
    if reason is not None:
        # As text: whoever keeps what was logged must not keep the tensors in its frames.
        text = "".join(traceback.format_exception(reason))
        _log.error("%s ended with %d tasks to do: %s", name, len(tasks), text)
    for task in tasks:
        error: BaseException = PipeClosedError("the pipe was closed during the call")
        if reason is not None:
            error = WorkerDiedError(f"{name} was ended from outside while it had tasks to do")
            error.__cause__ = reason
        task.abandon(error)
