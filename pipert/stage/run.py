"""A run: one mini-batch going through, and what its stages share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipert._typing import Value
from pipert.autograd.streams import CopyStreams, compute_stream, wait
from pipert.layers.random_numbers import RunSeed
from pipert.schedules.plan import Plan
from pipert.seeing.told import Told
from pipert.stage.links import SkipLinks
from pipert.stage.outcome import Outcome
from pipert.workers.context import CallerContext

__all__: list[str] = []


class Run:
    """One mini-batch going through. Made in the caller; dies when the call returns.

    Args:
        plan: its actions.
        devices: of each partition.
        context: the caller's.
        streams: the pipe's copy streams.
        told: who hears of what happens.
    """

    __slots__ = (
        "context", "devices", "dropped", "number", "outcome", "outputs", "plan", "seed", "skips",
        "sources", "streams", "told",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[torch.device],
        context: CallerContext,
        streams: CopyStreams,
        told: Told,
    ) -> None:
        self.plan = plan
        self.devices = devices
        self.context = context
        self.streams = streams
        self.told = told
        self.number = told.run.number
        self.outcome = Outcome(plan)
        self.seed = RunSeed()
        self.skips = SkipLinks()
        self.outputs: list[Value] = []
        self.sources: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
        self.dropped = False

    def return_what_was_read(self) -> None:
        """D1: let the caller's streams wait for all that was read on other streams of theirs.

        In the caller, when the run is over in whatever way. He may write next what he has passed
        in: arguments and targets, parameters, and what layers have handed on as it was.

        A device that has failed takes no wait: what is raised is what the run has failed by. An
        interrupt does not cut this short, and takes the place of that.
        """
        try:
            self._wait_for_sources()
        except RuntimeError:
            if not self.outcome.has_failed():
                raise
        except BaseException:
            self.outcome.cancel()  # or its errors would keep the frames that they come from
            self._wait_for_sources()
            raise

    def _wait_for_sources(self) -> None:
        for (device, _), source in list(self.sources.items()):
            wait(compute_stream(device), source)

    def drop(self) -> None:
        """Keep no values: nobody waits for them any more, though an action may be executing."""
        self.dropped = True
        self.skips.clear()
        self.outputs.clear()

    def __repr__(self) -> str:
        return f"<Run of {self.outcome!r}>"
