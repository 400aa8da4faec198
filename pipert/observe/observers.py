"""Defines observers, which are told what a pipe does while it does it.

The standard way is a hook for each kind of event, or a subclass of the runtime. Here it is one
object with one method for each event. The methods of :class:`Observer` do nothing; a subclass
overrides those it needs.

An observer cannot break a run: one that raises an ``Exception``, or anything on a worker, is
dropped, with a line in the log. On the main thread, anything but an ``Exception`` may come from a
signal handler, so it interrupts the call. While there is no observer, nothing is measured or
created for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Observer", "RunInfo", "TaskInfo"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identifies one call of a pipe."""

    number: int
    """Counted from 0 for each pipe."""
    micro_batches: int
    partitions: int


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """Identifies a task: ``F[i,j]`` or ``R[i,j]``, in a step also ``B[i,j]`` and ``W[i,j]``."""

    run: int
    """The number of the call."""
    phase: str
    """``'forward'``, ``'recomputation'``, ``'backward'`` or ``'weight gradient'``."""
    partition: int
    micro_batch: int
    device: torch.device


class Observer:
    """An object that is told what a pipe does. Subclass it, and override the methods you need.

    A method runs on the thread where the event happens: the caller's for a run, a worker's for a
    task, autograd's for a recomputation in ``loss.backward()``. So several may run at once. The
    work waits until the method returns: keep it short. Calling the pipe from a task is refused.

    An observer sees the calls that begin after it was added. If a call runs into its ``timeout``,
    its last tasks may finish after the call.
    """

    def run_started(self, run: RunInfo) -> None:
        """A call begins; its arguments have been split."""

    def run_finished(self, run: RunInfo, seconds: float, outcome: str) -> None:
        """A call is over after ``seconds``: ``'succeeded'``, ``'failed'`` or ``'cancelled'``.

        A cancelled call was interrupted, timed out, or ended because the pipe was closed.
        """

    def task_started(self, task: TaskInfo) -> None:
        """A task has its input and begins."""

    def task_finished(self, task: TaskInfo, seconds: float) -> None:
        """A task is over, failed or not. On CUDA its kernels are queued, not finished."""

    def failed(self, task: TaskInfo, error: BaseException) -> None:
        """``error`` is about to be raised, in the call or in the backward, because of this task.

        If several tasks failed, this is the first of them in the schedule. A step may also fail
        after its tasks, because of its loss or a parameter's hook; then no task is reported. An
        error that you keep also keeps what its frames reference: activations.
        """


Observers = dict[int, Observer]
"""The observers of one pipe, by ``id``, since they may define equality. Safe for any thread and
signal handler: operations of a dict on one item are atomic."""
