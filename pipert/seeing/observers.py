"""Observers: who wants to be told what a pipe does, as it does it.

The standard way is a hook for each kind of event, or a subclass of the runtime. Here it is one
object with one method for each event; :class:`Observer` has them all and does nothing, so that a
subclass says what it wants to hear.

An observer cannot break a run: one that raises an ``Exception``, or anything on a worker, is
dropped, with a line in the log. On the main thread what is no ``Exception`` may come from a signal
handler, so it is an interrupt of the call. While there is no observer, nothing is measured or made
for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Observer", "RunInfo", "TaskInfo"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One call of a pipe."""

    number: int
    """Counted from 0 for each pipe."""
    micro_batches: int
    partitions: int


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task of one call: ``F[i,j]`` or ``R[i,j]``, and in ``forward_backward`` ``B[i,j]``."""

    run: int
    """The number of the call."""
    phase: str
    """``'forward'``, ``'recomputation'`` or ``'backward'``."""
    partition: int
    micro_batch: int
    device: torch.device


class Observer:
    """Override what you want to be told. Everything is called on the thread where it happens.

    That is the caller's for the events of a run, and a worker for those of its tasks: several at
    once. The recomputations of a ``loss.backward()`` run on a thread of autograd. The work waits
    until the method returns, so be short. Calling the pipe from a task is refused.

    An observer sees the calls that begin after it was added. After a call was given up because of
    its ``timeout``, its last tasks may finish later than the call.
    """

    def run_started(self, run: RunInfo) -> None:
        """A call begins: its arguments are split."""

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        """It is over after ``seconds``: ``'succeeded'``, ``'failed'`` or ``'cancelled'``.

        Cancelled is what was interrupted, timed out, or met the end of the pipe.
        """

    def task_started(self, task: TaskInfo) -> None:
        """A task has its input and begins."""

    def task_finished(self, task: TaskInfo, seconds: float) -> None:
        """It is over, whether it failed or not. On CUDA its kernels are queued."""

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        """``error`` is about to be raised, in the call or in the backward, because of this task.

        Of several tasks that failed it is the first one in the schedule. A step may also fail after
        its tasks, because of its loss or a hook of a parameter; that is told of no task. Whoever
        keeps the error keeps what its frames reference: activations.
        """


Observers = dict[int, Observer]
"""Those of one pipe, by ``id``: whatever equality means to them. Any thread and signal handler:
what a dict does to one item is atomic."""
