"""The loop of a worker thread.

Guarantees:

* **W1** each accepted task has one outcome: it is sent, or it is abandoned with the reason. What
  its execution raises is the task's own business; an exception thrown into the thread from outside
  ends the loop, and the task at hand and all that are left are abandoned.
* **W2** an idle worker references nothing of its last task.
* **W3** a worker never references its pool: it gets a queue and values.
* **W4** workers end one after another, and what their threads hold for themselves goes with them.
"""

from __future__ import annotations

import enum
import logging
import threading
import traceback
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.multiprocessing import _set_thread_name

from pipert.errors import PipeClosedError, WorkerDiedError
from pipert.queues.closable import ClosableQueue, QueueClosed
from pipert.queues.process_lock import ProcessLock
from pipert.workers.activity import Activity
from pipert.workers.turn import Lock, Turn

__all__: list[str] = []

_log = logging.getLogger("pipert")

_ending = ProcessLock()
_last_to_end: threading.Thread | None = None  # who holds the lock changes it
_GONE = 5.0  # seconds; what a worker leaves behind is gone long before


class _NotRun(enum.Enum):
    NOT_RUN = "not run"


NOT_RUN = _NotRun.NOT_RUN
"""In place of a value: whoever should have made it did not run."""


class Task(Protocol):
    """What a worker takes from its in-queue: received, executed and sent once, or abandoned."""

    what: Any
    """Which one it is, for those who look; immutable, and without tensors."""
    layers_took: float | None
    """Seconds that layers of the user's took in ``execute``; ``None`` if it called none."""

    def receive(self, before_waiting: Callable[[], None]) -> Any:
        """Return what it needs, or ``NOT_RUN``. Calls ``before_waiting`` before it blocks."""

    def execute(self, received: Any) -> Any:
        """Do it. What it raises is the task's own business: it returns ``NOT_RUN``."""

    def send(self, result: Any) -> None:
        """Hand the result on, which may be ``NOT_RUN``, and settle the task."""

    def abandon(self, error: BaseException) -> None:
        """It never runs, or its run was broken off, because of ``error``. Settle it, if it is not
        settled yet. Called on any thread; must neither block nor raise."""


class WorkerThread(threading.Thread):
    """A daemon thread with an in-queue. Daemon, so that a layer that never returns cannot keep the
    interpreter alive; ``pool`` ends the others properly."""

    def __init__(
        self, name: str, device: torch.device, turns: Lock, activity: Activity
    ) -> None:
        in_queue: ClosableQueue[Task] = ClosableQueue()
        args = in_queue, device, Turn(turns), activity
        super().__init__(target=work, args=args, name=name, daemon=True)
        self.in_queue = in_queue
        self.lends_to: threading.Thread | None = None
        """The thread that does its task for it, for those who look."""

    def serves(self) -> bool:
        """Whether it takes tasks: one that is about to end does not, though it is alive."""
        return self.is_alive() and not self.in_queue.is_closed()

    def stop(self) -> None:
        """Let the thread end after its current task; it abandons the others. From anywhere."""
        self.in_queue.shut()
        if not self.is_alive():
            _abandon(self.in_queue.close(), None, self.name)


def work(
    in_queue: ClosableQueue[Task], device: torch.device, turn: Turn, activity: Activity
) -> None:
    """Receive, execute and send one task after the other, until the queue is closed."""
    name = threading.current_thread().name
    _set_thread_name(name[:15])  # what Linux takes
    task: Task | None = None
    reason: BaseException | None = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        while True:
            try:
                task = in_queue.get(turn.give_up)
            except QueueClosed:
                return
            activity.waits(task.what)
            value = task.receive(turn.give_up)
            if value is not NOT_RUN:
                turn.take()
                activity.works()
                started = perf_counter()
                value = task.execute(value)
                turn.executed(perf_counter() - started, task.layers_took)
            activity.rests()
            task.send(value)
            task = value = None  # W2
    except BaseException as error:  # noqa: B036  whoever waits for a task gets it
        reason = error
    finally:
        value = None
        turn.end()
        activity.rests()
        left = in_queue.close()
        if task is not None:
            left.insert(0, task)
        _abandon(left, reason, name)
        _wait_for_the_last_to_end()


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


def _wait_for_the_last_to_end() -> None:
    """Wait until the worker that ended before this one is gone (W4), for at most ``_GONE`` seconds.

    A thread's own values go after its last line of Python. ``torch.compile`` leaves tracebacks in
    them, and two threads that free such at once may stop the process for ever: one has torch's lock
    of dead frames and waits for the interpreter's, the other has that and waits for torch's.
    """
    global _last_to_end
    with _ending.current:
        before, _last_to_end = _last_to_end, threading.current_thread()
    if before is not None:
        before.join(_GONE)
