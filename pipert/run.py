"""What the lanes of one run share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipert._typing import Value
from pipert.autograd.random_state import RunSeed
from pipert.components import ALL, Components
from pipert.ledger import Account
from pipert.progress import Progress
from pipert.schedule import Schedule
from pipert.schedules import StepSchedule
from pipert.skip.routes import Mail
from pipert.stream import CopyStreams
from pipert.workers.context import CallerContext

__all__: list[str] = []


class Run:
    """One mini-batch going through. Made in the caller; dies when the call returns.

    Args:
        schedule: its forward tasks.
        checkpointed: how many micro-batches, from the first, are checkpointed.
        devices: of each partition.
        context: the caller's.
        streams: the pipe's copy streams.
        account: where what happens is told.
        components: the parts of the runtime that it has.
        posted: all its tasks, if there are others.
    """

    __slots__ = (
        "account", "checkpointed", "components", "context", "devices", "dropped", "mail", "outputs",
        "progress", "schedule", "seed", "streams",
    )  # fmt: skip

    def __init__(
        self,
        schedule: Schedule,
        checkpointed: int,
        devices: Sequence[torch.device],
        context: CallerContext,
        streams: CopyStreams,
        account: Account,
        components: Components = ALL,
        posted: Schedule | StepSchedule | None = None,
    ) -> None:
        self.schedule = schedule
        self.checkpointed = checkpointed
        self.devices = devices
        self.context = context
        self.streams = streams
        self.account = account
        self.components = components
        self.progress = Progress(posted or schedule)
        self.seed = RunSeed()
        self.mail = Mail()
        self.outputs: list[Value] = []
        self.dropped = False

    def drop(self) -> None:
        """Keep nothing of it: nobody waits for it any more, though a task may be executing."""
        self.dropped = True
        self.mail.clear()
        self.outputs.clear()

    def __repr__(self) -> str:
        return f"<Run of {self.progress!r}>"
