"""Defines the events of a recording, plain data, and observers, which a pipe tells what it does.

The standard way is a hook for each kind of event, or a subclass of the runtime. An observer is one
object with one method for each. An observer cannot break a run: one that raises an ``Exception`` is
dropped, with a line in the log. While there is no observer, nothing is measured or created for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipert.schedules.action import RULES, Action
from pipert.status import TaskInfo

__all__ = ["Event", "Observer", "RunInfo"]


_LETTERS = {RULES[letter].phase: letter for letter in "FRBW"}
COMPUTE = FORWARD, RECOMPUTE, BACKWARD, WEIGHT = tuple(_LETTERS)
COPY, WAIT = "copy", "wait"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a recording: what a device did, and when."""

    kind: str
    """``'forward'``, ``'recomputation'``, ``'backward'``, ``'weight gradient'``, ``'copy'`` or
    ``'wait'``."""
    micro_batch: int
    partition: int
    """The partition; for a copy, its destination."""
    device: torch.device
    """Where it ran; for a copy, its destination."""
    start: float
    """Seconds since the recording began."""
    end: float
    """Seconds since the recording began."""
    run: int = 0
    """The number of the call, counted from 0 for each pipe."""
    source: torch.device | None = None
    """For a copy, the device it comes from."""
    origin: int | None = None
    """For a copy, the partition it comes from; ``None`` for what comes from no partition, i.e. the
    arguments of the call and parameters that live on another device. Their gradients are copied
    with ``origin == partition``, other gradients with ``origin > partition``."""
    bytes: int = 0
    """For a copy, its size."""

    @property
    def seconds(self) -> float:
        """The duration of the event."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The name of the task, such as ``F[3,1]``; for a copy or a wait, a description."""
        letter = _LETTERS.get(self.kind)
        if letter is not None:
            return str(Action(letter, self.micro_batch, self.partition))
        if self.kind == COPY and self.origin is not None:
            return f"copy {self.micro_batch}: {self.origin} to {self.partition}"
        return f"{self.kind} {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Identifies one call of a pipe."""

    number: int
    """Counted from 0 for each pipe."""
    micro_batches: int
    partitions: int


class Observer:
    """Follows the calls and tasks of a pipe. Subclass it, and override the methods you need.

    A method runs on the thread where the event happens: the caller's for a run, for a task that
    which computes it, autograd's for a recomputation in ``loss.backward()``. So several may run at
    once. The work waits until the method returns: keep it short. Calling the pipe from a task is
    refused.

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
        """This task failed; the call or the backward is about to raise ``error``.

        If several tasks failed, this is the first of them in the schedule. A step may also fail
        after its tasks, because of its loss or a parameter's hook; then no task is reported. An
        error that you keep also keeps what its frames reference: activations.
        """
