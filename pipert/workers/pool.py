"""Starts and ends the threads of one pipe.

Guarantees:

* **P1** threads start at the first use and are reused.
* **P2** ``close`` is idempotent, may be called from anywhere, and joins, except from inside a
  task, since the other workers may be waiting for that task.
* **P3** ``stop`` ends the threads without joining; a finalizer calls it when the last reference to
  a pipe is dropped.
* **P4** the interpreter exits: at exit all threads are stopped and joined, for at most
  ``_AT_EXIT``.
* **P5** a forked child has none of its parent's threads; it starts its own.
* **P6** threads are named ``pipert-<device>-<n>``, for the operating system too.

The lock guards the list of threads. It is reentrant, because a signal handler may close the pool on
the very thread that is starting it; ``stop`` takes no lock, because a finalizer may run anywhere.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from pipert.errors import PipeClosedError, WorkerDiedError
from pipert.queues.locks import ProcessLock
from pipert.status import WorkerStatistics
from pipert.workers.worker import Activity, Task, WorkerThread

_AT_EXIT = 10.0  # s


class Pool:
    """Worker threads, each with a name and a device."""

    def __init__(self, names: Sequence[str], devices: Sequence[torch.device]) -> None:
        self._names = tuple(names)
        self._devices = tuple(devices)
        self._closed, self.closed_by = False, ""
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._threads: list[WorkerThread] = []
        self._activities = tuple(Activity() for _ in self._names)
        self._pid = os.getpid()

    def _reset_in_child(self) -> None:
        """Start anew in a forked child (P5)."""
        if self._pid != os.getpid():
            with _resetting.current:
                if self._pid != os.getpid():
                    self._reset()

    def put(self, worker: int, task: Task) -> None:
        """Give a task to a worker, or abandon it if that worker no longer takes tasks."""
        threads = self._threads  # none in a forked child
        left = threads[worker].in_queue.put(task) if threads else [task]
        for each in left:
            if self._closed:
                error: BaseException = PipeClosedError("the pipe was closed during the call")
            else:
                error = WorkerDiedError(f"{self._names[worker]} was ended from outside")
            each.abandon(error)

    def start(self) -> list[WorkerThread]:
        """Ensure that each worker has a live thread, and return the threads.

        Raises:
            PipeClosedError: the pool was closed.
        """
        self._reset_in_child()
        if _exiting:
            raise PipeClosedError("the interpreter is exiting; call pipes before that")
        if (
            not self._closed
            and len(self._threads) == len(self._names)
            and all([thread.serves() for thread in self._threads])
        ):
            return list(self._threads)
        with self._lock:
            if self._closed:
                raise PipeClosedError(
                    f"the pipe was closed{self.closed_by}; make a new one of the same module, with "
                    "Pipe(module, ...) or pipert.pipeline(module, ...)"
                )
            for k in range(len(self._names)):
                if k < len(self._threads) and self._threads[k].serves():
                    continue
                for old in self._threads[k : k + 1]:
                    old.stop()  # its start may have been interrupted, so it may still come alive
                thread = WorkerThread(
                    self._names[k], self._devices[k], self._activities[k]
                )
                self._threads[k : k + 1] = [thread]  # first: nothing else would stop it
                thread.start()
            if self.closed:  # meanwhile, by a signal handler or another thread
                self.stop()
                raise PipeClosedError("the pipe was closed while its threads were starting")
        return list(self._threads)

    def stop(self) -> None:
        """Make every thread end after its current task, without waiting for it (P3)."""
        self._closed = True
        if self._pid == os.getpid():
            for thread in list(self._threads):
                thread.stop()

    def close(self, join: bool = True, timeout: float | None = None) -> list[int]:
        """Stop the threads, and join them unless called from a task of the pool (P2).

        Waits for at most ``timeout`` seconds. Returns the workers still running after that,
        but for those that wait for an import of this thread: they end after it.
        """
        self.stop()
        if self._pid != os.getpid():
            return []  # a forked child has no threads, and the lock may be held for ever
        with self._lock:  # no other thread is starting workers now
            threads = list(self._threads)
        self.stop()
        if not join:
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            if thread.is_alive():  # a thread never started cannot be joined
                thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return [k for k, t in enumerate(threads) if t.is_alive() and not t.import_awaited()]

    def statistics(self) -> list[WorkerStatistics]:
        """Return what each worker is doing. Thread-safe."""
        self._reset_in_child()
        depths = [thread.in_queue.depth() for thread in self._threads]
        depths += [0] * (len(self._names) - len(depths))
        about = zip(self._names, self._devices, depths, strict=True)
        return [each.statistics(*of) for each, of in zip(self._activities, about, strict=True)]

    def stack(self, worker: int) -> str:
        """Return the worker's Python stack, printed like a traceback, innermost call last.

        It begins with the called layer: the frames above it are the same for all.
        """
        for thread in self._threads[worker : worker + 1]:
            stack = stack_of(thread.executed_by or thread)
            in_layer = list(itertools.dropwhile(lambda f: f.filename.startswith(_OURS), stack))
            return "".join(traceback.format_list(in_layer or stack))
        return ""

    @property
    def closed(self) -> bool:
        """Whether :meth:`stop` or :meth:`close` was called."""
        return self._closed


_resetting = ProcessLock(reentrant=True)

_OURS = (str(Path(__file__).parents[1]), threading.__file__)


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)', re.MULTILINE)


def stack_of(thread: threading.Thread) -> list[traceback.FrameSummary]:
    """Return the Python calls of ``thread``, innermost last; none if the thread has ended.

    ``sys._current_frames`` walks the frames in Python while the thread runs on, and so reads frames
    that it has already left: CPython 3.11 then crashes, about once in a thousand looks at a busy
    thread. ``faulthandler`` writes all stacks without releasing the interpreter. It sees at
    most a hundred threads of a process, and the hundred innermost calls of each.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    for stack in text.split("\n\n"):
        head = _THREAD.match(stack)
        if head and int(head[1], 16) == thread.ident:
            return [
                traceback.FrameSummary(path, int(line), name.rpartition(".")[2])
                for path, line, name in reversed(_FRAME.findall(stack))
            ]
    return []


_exiting: list[bool] = []  # not empty once the threads of the process have been ended


@atexit.register
def _end_all() -> None:
    """End all threads (P4): daemon threads inside torch can crash an interpreter that exits."""
    _exiting.append(True)
    threads = [thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)]
    threads = [thread for thread in threads if thread.is_alive()]
    for thread in threads:
        thread.stop()
    deadline = time.monotonic() + _AT_EXIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def assign_workers(devices: Sequence[torch.device]) -> list[int]:
    """Return the worker of each partition: one for each device, and for each plain ``'cpu'``."""
    # An object() is equal to no other, so each plain 'cpu' gets a number of its own.
    logical = [object() if device == torch.device("cpu") else device for device in devices]
    numbers = {device: k for k, device in enumerate(dict.fromkeys(logical))}
    return [numbers[device] for device in logical]
