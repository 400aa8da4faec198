"""Records all ranks of a pipeline: each its own tasks, which are exchanged at the end.

The clocks of machines differ, so the ranks meet a few times at the beginning, and their clocks are
compared by the moments at which each goes on. Which rank another has waited for is derived at the
end: it was idle while the input of its next task had not been computed there.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from pipert.distributed.agreement import Control
from pipert.distributed.runtime import Runtime
from pipert.observe.event import BACKWARD, FORWARD, RECOMPUTE, WAIT, Event
from pipert.observe.recorder import Recording
from pipert.timeline.advice import cores
from pipert.timeline.timeline import Timeline

__all__: list[str] = []

_CPU = torch.device("cpu")
_MEETINGS = 7  # a rank may be woken late from one or two of them


class _Part(NamedTuple):
    """The recording of one rank."""

    events: list[Event]
    layers: dict[int, list[float]]
    """For each of the rank's partitions, the seconds that each layer took."""
    steps: set[int]
    """The numbers of the runs that went backward."""
    failed: set[int]
    """The numbers of the runs that failed."""
    met: list[float]
    """The moments at which the rank went on after each meeting."""

    def by_clock_of(self, other: _Part) -> Iterator[Event]:
        """Yield the events with times by another rank's clock."""
        ahead = median([mine - theirs for mine, theirs in zip(self.met, other.met, strict=True)])
        for event in self.events:
            yield replace(event, start=event.start - ahead, end=event.end - ahead)


class RankTimeline(Timeline):
    """The events of all ranks of a pipeline; it is filled when the block has ended on all."""

    def __init__(
        self, homes: Sequence[int], devices: Sequence[torch.device], chunks: int, cores: int
    ) -> None:
        self._ranks = sorted(set(homes))
        workers = [self._ranks.index(home) for home in homes]
        super().__init__((), devices, workers, chunks=chunks)
        self._cores = cores

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the ranks, such as ``'rank 0'``."""
        return tuple([f"rank {rank}" for rank in self._ranks])

    def fill(self, parts: Sequence[_Part]) -> None:
        """Take the recordings of all ranks, in their order."""
        recorded = [event for part in parts for event in part.by_clock_of(parts[0])]
        in_order = Timeline(recorded, self.devices, self._workers).events
        shown = [*_cut_at_recomputations(in_order), *_waits(in_order, self._workers)]
        layers = {j: seconds for part in parts for j, seconds in part.layers.items() if seconds}
        self._events = Timeline(shown, self.devices, self._workers).events
        self._steps = frozenset().union(*[part.steps for part in parts])
        self._failed = frozenset().union(*[part.failed for part in parts])
        if len(layers) == len(self.devices):
            self._layers = [layers[j] for j in range(len(layers))]


@contextmanager
def record(runtime: Runtime, chunks: int) -> Iterator[Timeline]:
    """Record the tasks of all ranks in the block, which all of them enter and leave.

    After an error in the block the timeline stays empty: other ranks may be elsewhere, so nothing
    is exchanged.
    """
    site = runtime.site
    machines = site.control.agree((site.device, platform.node(), cores()), to="record()")
    devices = [machines[site.control.ranks.index(home)][0] for home in site.homes]
    cores_by_node = dict([(node, count) for _, node, count in machines])
    timeline = RankTimeline(site.homes, devices, chunks, sum(cores_by_node.values()))
    recording = Recording([site.device])
    met = [_meet(site.control) for _ in range(_MEETINGS)]
    runtime.counters.start_recording(recording)
    try:
        yield timeline
    finally:
        runtime.counters.stop_recording(recording)
    partitions = runtime.parts.modules
    layers = {j: recording.layer_seconds(j, len(part)) for j, part in partitions.items()}
    met = [recording.origin.date(moment, _CPU) for moment in met]
    own = _Part(recording.events(), layers, recording.steps, recording.failed, met)
    parts = site.control.agree(own, to="the end of record()")
    timeline.fill([parts[site.control.ranks.index(rank)] for rank in sorted(set(site.homes))])


def _meet(control: Control) -> float:
    """Wait for all ranks; return when this one goes on."""
    control.agree(None)
    return perf_counter()


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
