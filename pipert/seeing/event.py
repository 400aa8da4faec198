"""What is recorded: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipert.schedules.action import Action

__all__ = ["Event"]

FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"
COPY = "copy"
WAIT = "wait"

KINDS = (FORWARD, RECOMPUTE, BACKWARD, COPY, WAIT)
COMPUTE = (FORWARD, RECOMPUTE, BACKWARD)

_LETTERS = {FORWARD: "F", RECOMPUTE: "R", BACKWARD: "B"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}


def kind_of(action: Action) -> str:
    """How the event of an action is called."""
    return _KINDS.get(action.kind, action.phase)


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a recording: what a device did, and when."""

    kind: str
    """``'forward'``, ``'recompute'``, ``'backward'``, ``'copy'`` or ``'wait'``."""
    i: int
    """The micro-batch."""
    j: int
    """The partition; of a copy, the one that it goes to."""
    device: torch.device
    """Where it ran; of a copy, where it goes."""
    start: float
    """Seconds since the recording began."""
    end: float
    """Seconds since the recording began."""
    run: int = 0
    """The number of the call, counted from 0 for each pipe."""
    source: torch.device | None = None
    """Of a copy: the device it comes from."""
    origin: int | None = None
    """Of a copy: the partition it comes from; ``None`` of what the partition takes from elsewhere,
    arguments of the call and parameters that live on another device. Gradients of those go back
    with ``origin == j``, other gradients with ``origin > j``. Of a wait: the partition that it is
    for, if that is another rank's."""
    bytes: int = 0
    """Of a copy: its size."""

    @property
    def clock(self) -> int:
        """The diagonal of the task: ``i + j``."""
        return self.i + self.j

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """The name of the task, such as ``F[3,1]``; of a copy or a wait, a description."""
        letter = _LETTERS.get(self.kind)
        if letter is not None:
            return str(Action(letter, self.i, self.j))
        if self.kind == COPY and self.origin is not None:
            return f"copy {self.i}: {self.origin} to {self.j}"
        return f"{self.kind} {self.i}"
