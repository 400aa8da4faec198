"""Defines the events of a recording: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipert.schedules.action import Action

__all__ = ["Event"]

FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"
WEIGHT = "weight gradient"
COPY = "copy"
WAIT = "wait"

KINDS = (FORWARD, RECOMPUTE, BACKWARD, WEIGHT, COPY, WAIT)
COMPUTE = (FORWARD, RECOMPUTE, BACKWARD, WEIGHT)

_LETTERS = {FORWARD: "F", RECOMPUTE: "R", BACKWARD: "B", WEIGHT: "W"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


def kind_of(action: Action) -> str:
    """Return the kind of the event that records an action."""
    return _KINDS.get(action.kind, action.phase)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a recording: what a device did, and when."""

    kind: str
    """``'forward'``, ``'recompute'``, ``'backward'``, ``'weight gradient'``, ``'copy'`` or
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
    with ``origin == partition``, other gradients with ``origin > partition``. For a wait, the
    partition it waits for, if that is another rank's."""
    bytes: int = 0
    """For a copy, its size."""

    @property
    def clock(self) -> int:
        """The diagonal of the task: ``micro_batch + partition``."""
        return self.micro_batch + self.partition

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
