"""A run: one mini-batch going through, and what its stages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pipert._typing import Value
from pipert.autograd.streams import CopyStreams, compute_stream, wait
from pipert.layers.random_numbers import RunSeed
from pipert.schedules.plan import Plan
from pipert.seeing.told import Told
from pipert.stage.links import SkipLinks
from pipert.stage.outcome import Outcome
from pipert.stage.shared_memory import Shared
from pipert.workers.context import CallerContext

__all__: list[str] = []


@dataclass(slots=True, eq=False)
class Run:
    """One mini-batch going through. Made in the caller; dies when the call returns."""

    plan: Plan
    devices: Sequence[torch.device]
    """Of each partition."""
    context: CallerContext
    streams: CopyStreams
    told: Told
    number: int = field(init=False)
    outcome: Outcome = field(init=False)
    seed: RunSeed = field(default_factory=RunSeed)
    skips: SkipLinks = field(default_factory=SkipLinks)
    outputs: list[Value] = field(default_factory=list)
    sources: dict[tuple[torch.device, int], torch.cuda.Stream] = field(default_factory=dict)
    """The streams that something was copied from, by device and micro-batch."""
    handed_on: dict[tuple[int, int], Shared] = field(default_factory=dict)
    """By micro-batch and stage the tensors of its input that shared memory before; ints alone."""
    at_end: Callable[[], None] | None = None
    """Called in the caller when the run is over, in whatever way."""
    dropped: bool = False
    """Whether nobody waits for it any more."""

    def __post_init__(self) -> None:
        self.number = self.told.run.number
        self.outcome = Outcome(self.plan)

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

    def end(self) -> None:
        """In the caller: it is over, in whatever way. An interrupt does not cut this short."""
        at_end = self.at_end
        if at_end is None:
            return
        try:
            at_end()
        except BaseException:
            at_end()
            raise
        finally:
            self.at_end = None

    def drop(self) -> None:
        """Keep no values: nobody waits for them any more, though an action may be executing."""
        self.dropped = True
        self.skips.clear()
        self.outputs.clear()

    def __repr__(self) -> str:
        return f"<Run of {self.outcome!r}>"
