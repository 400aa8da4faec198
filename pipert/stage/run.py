"""What the lanes of one run share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipert._typing import Value
from pipert.autograd.streams import CopyStreams, compute_stream, wait
from pipert.layers.random_numbers import RunSeed
from pipert.schedules.clock_cycle import Schedule
from pipert.schedules.plan import StepSchedule
from pipert.seeing.ledger import Account
from pipert.skip.routes import Mail
from pipert.stage.components import ALL, Components
from pipert.stage.outcome import Progress
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
        "progress", "schedule", "seed", "sources", "streams",
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
        self.sources: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self.dropped = False

    def return_what_was_read(self) -> None:
        """D1: the caller's streams wait for all that has been read on other streams of theirs.

        In the caller, when the run is over in whatever way. He may write next what he has passed
        in: arguments and targets, parameters, and what layers have handed on as it was.

        A device that has failed takes no wait: what is raised is what the run has failed by. An
        interrupt does not cut this short, and takes the place of that.
        """
        try:
            self._wait_for_sources()
        except RuntimeError:
            if not self.progress.has_failed():
                raise
        except BaseException:
            self.progress.cancel()  # or its errors would keep the frames that they come from
            self._wait_for_sources()
            raise

    def _wait_for_sources(self) -> None:
        for (device, _), source in list(self.sources.items()):
            wait(compute_stream(device), source)

    def drop(self) -> None:
        """Keep nothing of it: nobody waits for it any more, though a task may be executing."""
        self.dropped = True
        self.mail.clear()
        self.outputs.clear()

    def __repr__(self) -> str:
        return f"<Run of {self.progress!r}>"
