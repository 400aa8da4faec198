"""Records all ranks of a pipeline: each its own tasks, which are exchanged at the end.

The clocks of machines differ, so the ranks meet a few times at the beginning, and their clocks are
compared by the moments at which each goes on. Which rank another has waited for is derived at the
end: it was idle while the input of its next task had not been computed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from pipert.distributed.rank_run import RankRuntime
from pipert.observe.event import BACKWARD, FORWARD, RECOMPUTE, WAIT, Event
from pipert.observe.recorder import Recording
from pipert.timeline.timeline import Timeline

_MEETINGS = 7  # a rank may be woken late from one or two of them
Recorded = tuple[list[Event], set[int], set[int], list[float]]
"""The events of a rank, its steps and failed calls, and when it went on from the meetings."""


class RankTimeline(Timeline):
    """The events of all ranks of a pipeline; there are none before the block has ended on all."""

    def __init__(self, homes: Sequence[int], devices: Sequence[torch.device]) -> None:
        self._ranks = sorted(set(homes))
        super().__init__((), devices, [self._ranks.index(home) for home in homes])

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the ranks, such as ``'rank 0'``."""
        return tuple([f"rank {rank}" for rank in self._ranks])

    def fill(self, recorded: dict[int, Recorded]) -> None:
        """Take the recordings of all ranks, by the clock of the first."""
        first, events = recorded[self._ranks[0]], list[Event]()
        for rank in self._ranks:
            own, _, _, met = recorded[rank]
            ahead = median([mine - theirs for mine, theirs in zip(met, first[3], strict=True)])
            events += [replace(e, start=e.start - ahead, end=e.end - ahead) for e in own]
        events.sort(key=lambda event: (event.start, event.end))
        shown = [*_cut_at_recomputations(events), *_waits(events, self._workers)]
        failed = {number for rank in self._ranks for number in recorded[rank][2]}
        super().__init__(shown, self.devices, self._workers, first[1], failed)


@contextmanager
def record(runtime: RankRuntime) -> Iterator[Timeline]:
    """Record the tasks of all ranks in the block, which all of them enter and leave.

    After an error in the block the timeline stays empty: other ranks may be elsewhere, so nothing
    is exchanged.
    """
    site, agreement = runtime.site, runtime.site.agreement
    recording, met = Recording([site.device]), list[float]()
    for _ in range(_MEETINGS):
        devices = agreement.agree(site.device, to="record()")
        met.append(recording.origin.date(perf_counter(), torch.device("cpu")))
    timeline = RankTimeline(site.homes, [agreement.of(home, devices) for home in site.homes])
    runtime.counters.start_recording(recording)
    try:
        yield timeline
    finally:
        runtime.counters.stop_recording(recording)
    own = recording.events(), recording.steps, recording.failed, met
    reports = agreement.agree(own, to="the end of record()")
    timeline.fill(dict(zip(agreement.ranks, reports, strict=True)))


def _waits(events: Sequence[Event], workers: Sequence[int]) -> list[Event]:
    """Find when each rank waited for another: of a split backward, for the first half."""
    tasks = [event for event in events if event.kind in (FORWARD, BACKWARD)]
    done: dict[tuple[str, int, int, int], float] = {}
    run_starts: dict[int, float] = {}
    for task in tasks:
        done.setdefault((task.kind, task.run, task.micro_batch, task.partition), task.end)
        run_starts.setdefault(task.run, task.start)
    idle_since: dict[int, float] = {}
    waits = []
    for task in tasks:
        rank, origin = workers[task.partition], task.partition + (-1 if task.kind == FORWARD else 1)
        start = max(idle_since.get(rank, 0.0), run_starts[task.run])
        end = min(done.get((task.kind, task.run, task.micro_batch, origin), start), task.start)
        if start < end and workers[origin] != rank:
            about = WAIT, task.micro_batch, task.partition, task.device, start, end, task.run
            waits.append(Event(*about, origin=origin))
        idle_since[rank] = task.end
    return waits


def _cut_at_recomputations(events: Sequence[Event]) -> Iterator[Event]:
    """Cut each backward into pieces around the recomputations inside it."""
    recomputations: dict[tuple[int, int, int], list[Event]] = {}
    for event in events:
        if event.kind == RECOMPUTE:
            task = event.run, event.micro_batch, event.partition
            recomputations.setdefault(task, []).append(event)
    for event in events:
        if event.kind == BACKWARD:
            for inner in recomputations.get((event.run, event.micro_batch, event.partition), ()):
                yield replace(event, end=inner.start)
                event = replace(event, start=inner.end)
        yield event
