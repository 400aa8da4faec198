"""Runs the loop of a worker thread.

Guarantees:

* **W1** each accepted task has one outcome: it is sent, or it is abandoned with the reason. A task
  handles what its own execution raises. An exception thrown into the thread from outside ends the
  loop; then the current task and all that are left are abandoned.
* **W2** an idle worker references nothing of its last task.
* **W3** a worker never references its pool: it gets a queue and values.
* **W4** workers end one after another, and each frees its thread-local values as it ends.
"""

from __future__ import annotations

import logging
import math
import threading
import traceback
from time import monotonic, perf_counter
from typing import Any, Protocol

import torch

from pipert._torch import import_awaited, set_thread_name
from pipert.errors import PipeClosedError, WorkerDiedError
from pipert.queues.closable import ClosableQueue
from pipert.queues.locks import ProcessLock
from pipert.status import WAITING, TaskInfo, WorkerStatistics

CHECK = 0.5
"""Seconds; how often a thread that waits for workers checks that it waits for something."""

_log = logging.getLogger("pipert")

_ending = ProcessLock()
_last_to_end: threading.Thread | None = None  # guarded by the lock
_END_TIMEOUT = 5.0  # s; a thread has freed its values long before


NOT_RUN = object()
"""Takes the place of the value of a task that failed or did not run."""


class Activity:
    """What a worker is doing and has done. It is kept when the worker's thread is replaced.

    Only the worker's thread writes the state, a tuple that is replaced in one step: the number and
    the seconds of completed tasks, ``what`` the current task is (``None`` when idle), since when,
    and whether it is executed, rather than waited for. So a reader on any thread sees figures of
    one moment, without a lock. It holds words and numbers (**W2**).
    """

    __slots__ = ("_seen", "_state")

    def __init__(self) -> None:
        self._state: tuple[int, float, Any, float, bool] = (0, 0.0, None, 0.0, False)
        self._seen = 0.0

    def waits(self, what: Any) -> None:
        """Note that the worker waits for the input of a task. ``what`` must hold no tensors."""
        tasks, busy, *_ = self._state
        self._state = tasks, busy, what, perf_counter(), False

    def works(self) -> None:
        """Note that the task begins."""
        tasks, busy, what, *_ = self._state
        self._state = tasks, busy, what, perf_counter(), True

    def rests(self) -> None:
        """Note that the task is over."""
        tasks, busy, _, since, works = self._state
        if works:
            tasks, busy = tasks + 1, busy + perf_counter() - since
        self._state = tasks, busy, None, 0.0, False

    def statistics(self, name: str, device: torch.device, depth: int) -> WorkerStatistics:
        """Return the figures of the worker of that name and device; ``depth`` is its queue's.

        Busy seconds never decrease: the worker may have read the clock at the end of its task
        without having written it yet.
        """
        now = perf_counter()  # before the state, so that no task is counted beyond its end
        tasks, busy, what, since, works = self._state
        seconds = max(0.0, now - since)
        self._seen = max(busy + seconds * works, self._seen)
        doing = None
        if what is not None:
            run, action = what
            phase = action.phase if works else WAITING
            doing = TaskInfo(run, phase, action.j, action.i, device, seconds)
        return WorkerStatistics(name, device, tasks, self._seen, depth, doing)


class Task(Protocol):
    """A task in a worker's in-queue. It is received, executed and sent once, or abandoned."""

    what: Any
    """The number of the run and the action, for those who look at the worker."""

    def receive(self) -> Any:
        """Wait for the input and return it, or ``NOT_RUN``."""

    def execute(self, received: Any) -> Any:
        """Return the result; ``NOT_RUN`` if the execution fails, which the task handles itself."""

    def send(self, result: Any) -> None:
        """Send the result, which may be ``NOT_RUN``, and settle the task."""

    def abandon(self, error: BaseException) -> None:
        """Settle the task, unless it is settled: because of ``error`` it never runs, or was broken
        off. Thread-safe; must neither block nor raise."""


class WorkerThread(threading.Thread):
    """A daemon thread with an in-queue. As a daemon it cannot keep the interpreter alive if a layer
    never returns; ``pool`` ends the others properly."""

    def __init__(self, name: str, device: torch.device, activity: Activity) -> None:
        in_queue: ClosableQueue[Task] = ClosableQueue()
        args = in_queue, device, activity
        super().__init__(target=work, args=args, name=name, daemon=True)
        self.in_queue = in_queue
        self.executed_by: threading.Thread | None = None
        """The thread that executes this one's task for it, for those who look at its stack."""

    def serves(self) -> bool:
        """Return whether it takes tasks. A thread about to end does not, though it is alive."""
        return self.is_alive() and not self.in_queue.closed

    def import_awaited(self) -> str:
        """Return the module that its task imports and the current thread is importing, or ''."""
        return import_awaited((self.executed_by or self).ident)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, but not for an import that waits for the current thread's."""
        deadline = math.inf if timeout is None else monotonic() + timeout
        while self.is_alive() and not self.import_awaited():
            super().join(max(0.0, min(CHECK, deadline - monotonic())))
            if monotonic() >= deadline:
                return

    def stop(self) -> None:
        """Let the thread end after its current task and abandon the others. From anywhere."""
        self.in_queue.close()
        if not self.is_alive():
            _abandon(self.in_queue.drain(), None, self.name)


def work(in_queue: ClosableQueue[Task], device: torch.device, activity: Activity) -> None:
    """Receive, execute and send one task after the other, until the queue is closed."""
    name = threading.current_thread().name
    set_thread_name(name[:15])  # what Linux takes
    task: Task | None = None
    reason: BaseException | None = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        for task in in_queue:
            if in_queue.closed:
                return
            activity.waits(task.what)
            value = task.receive()
            if value is not NOT_RUN:
                activity.works()
                value = task.execute(value)
            activity.rests()
            task.send(value)
            task = value = None  # W2
    except BaseException as error:  # noqa: B036  the cause of the error that callers get
        reason = error
    finally:
        value = None
        activity.rests()
        left = in_queue.drain()
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
    """Wait for at most ``_END_TIMEOUT`` until the worker that ended before this one is gone (W4).

    Thread-local values are freed after the thread's last line of Python. ``torch.compile`` leaves
    tracebacks in them, and two threads that free tracebacks at the same time may deadlock: one
    holds torch's lock of dead frames and waits for the interpreter's, the other the reverse.
    """
    global _last_to_end
    with _ending.current:
        previous, _last_to_end = _last_to_end, threading.current_thread()
    if previous is not None:
        previous.join(_END_TIMEOUT)
