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

from pipert.distributed.rank_agreement import Agreement
from pipert.distributed.rank_run import RankRuntime
from pipert.observe.event import BACKWARD, FORWARD, RECOMPUTE, WAIT, Event
from pipert.observe.recorder import Recording
from pipert.timeline.timeline import Timeline

_MEETINGS = 7  # a rank may be woken late from one or two of them


class RankTimeline(Timeline):
    """The events of all ranks of a pipeline; it is filled when the block has ended on all."""

    def __init__(self, homes: Sequence[int], devices: Sequence[torch.device]) -> None:
        self._ranks = sorted(set(homes))
        workers = [self._ranks.index(home) for home in homes]
        super().__init__((), devices, workers)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the ranks, such as ``'rank 0'``."""
        return tuple([f"rank {rank}" for rank in self._ranks])

    def fill(self, events: list[Event], steps: set[int], failed: set[int]) -> None:
        """Take the recordings of all ranks."""
        events.sort(key=lambda event: (event.start, event.end))
        shown = [*_cut_at_recomputations(events), *_waits(events, self._workers)]
        super().__init__(shown, self.devices, self._workers, steps, failed)


@contextmanager
def record(runtime: RankRuntime) -> Iterator[Timeline]:
    """Record the tasks of all ranks in the block, which all of them enter and leave.

    After an error in the block the timeline stays empty: other ranks may be elsewhere, so nothing
    is exchanged.
    """
    site, agreement = runtime.site, runtime.site.agreement
    device_of = agreement.agree(site.device, to="record()")
    devices = [agreement.of(home, device_of) for home in site.homes]
    timeline = RankTimeline(site.homes, devices)
    recording = Recording([site.device])
    ahead = _seconds_ahead(agreement, recording)
    runtime.counters.start_recording(recording)
    try:
        yield timeline
    finally:
        runtime.counters.stop_recording(recording)
    events = [
        replace(event, start=event.start - ahead, end=event.end - ahead)
        for event in recording.events()
    ]
    own = events, recording.steps, recording.failed
    reports = agreement.agree(own, to="the end of record()")
    parts = [agreement.of(rank, reports) for rank in sorted(set(site.homes))]
    timeline.fill(
        [event for events, *_ in parts for event in events],
        set().union(*[steps for *_, steps, _ in parts]),
        set().union(*[failed for *_, failed in parts]),
    )


def _seconds_ahead(agreement: Agreement, recording: Recording) -> float:
    """Return how far the recording's clock is ahead of that of the first rank."""
    met = []
    for _ in range(_MEETINGS):
        agreement.agree(None)
        met.append(recording.origin.date(perf_counter(), torch.device("cpu")))
    first = agreement.agree(met)[0]
    ahead: float = median([mine - theirs for mine, theirs in zip(met, first, strict=True)])
    return ahead


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
