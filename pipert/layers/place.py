"""Describes where an action is carried out, for errors."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pipert.errors import add_note
from pipert.schedules.action import Action


class Place(NamedTuple):
    """Partition *j* of *n* on its device, in a run of *m* micro-batches."""

    j: int
    n: int
    m: int
    device: torch.device

    @property
    def is_last(self) -> bool:
        """Whether this is the last partition."""
        return self.j == self.n - 1

    def note(self, error: BaseException, action: Action) -> None:
        """Add a note to ``error`` that names the action, unless one already names its layer."""
        add_note(error, partial(self._note_if_new, error, action))

    def _note_if_new(self, error: BaseException, action: Action) -> str:
        note = self.describe(action)
        start = note[: note.index(",", note.index("]"))]
        notes = getattr(error, "__notes__", ())
        return "" if any(str(other).startswith(start) for other in notes) else note

    def describe(self, action: Action, where: str = "") -> str:
        """Describe where an action is carried out, for the note of an error."""
        return (
            f"in {action.phase} {action}: partition {self.j} on {self.device}{where}, "
            f"micro-batch {action.i} of {self.m}"
        )

    def __str__(self) -> str:
        return f"partition {self.j} on {self.device}"


def describe_layer(name: str, layer: nn.Module | None) -> str:
    """Describe a layer for errors."""
    return f"layer {name!r} ({type(layer).__qualname__})"
