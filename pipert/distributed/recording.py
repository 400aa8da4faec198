"""One recording of all ranks: each notes its own tasks, and all get those of all at the end.

Clocks of machines differ, so ranks meet some times at the beginning and compare them by when each
goes on. For which rank a rank has waited is known at the end: it was idle, and what its next task
needs had not been computed there.
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
from pipert.seeing.event import BACKWARD, FORWARD, RECOMPUTE, WAIT, Event
from pipert.seeing.recorder import Recording
from pipert.timeline.advice import cores
from pipert.timeline.timeline import Timeline

__all__: list[str] = []

_CPU = torch.device("cpu")
_TIMES = 7  # that ranks meet: some may be woken late once or twice


class _Part(NamedTuple):
    """What one rank has recorded."""

    events: list[Event]
    layers: dict[int, list[float]]
    """For each of its partitions the seconds of its layers."""
    steps: set[int]
    failed: set[int]
    met: list[float]
    """When it went on after all had met."""

    def by_clock_of(self, other: _Part) -> Iterator[Event]:
        """Its events, by another rank's clock."""
        ahead = median([mine - theirs for mine, theirs in zip(self.met, other.met, strict=True)])
        for event in self.events:
            yield replace(event, start=event.start - ahead, end=event.end - ahead)


class RankTimeline(Timeline):
    """The events of all ranks of a pipeline: none until the block has ended on all."""

    def __init__(
        self, homes: Sequence[int], devices: Sequence[torch.device], chunks: int, cores: int
    ) -> None:
        self._ranks = sorted(set(homes))
        workers = [self._ranks.index(home) for home in homes]
        super().__init__((), devices, workers, chunks=chunks)
        self._cores = cores

    @property
    def lanes(self) -> tuple[str, ...]:
        """The ranks' names: ``'rank 0'``."""
        return tuple([f"rank {rank}" for rank in self._ranks])

    def fill(self, parts: Sequence[_Part]) -> None:
        """Show what the ranks have recorded."""
        found = [event for part in parts for event in part.by_clock_of(parts[0])]
        events = Timeline(found, self.devices, self._workers).events
        found = [*_apart(events), *_waits(events, self._workers)]
        layers = {j: seconds for part in parts for j, seconds in part.layers.items() if seconds}
        self._events = Timeline(found, self.devices, self._workers).events
        self._steps = frozenset().union(*[part.steps for part in parts])
        self._failed = frozenset().union(*[part.failed for part in parts])
        if len(layers) == len(self.devices):
            self._layers = [layers[j] for j in range(len(layers))]


@contextmanager
def record(runtime: Runtime, chunks: int) -> Iterator[Timeline]:
    """Record what all ranks do in the block, which all of them enter and leave.

    Where an error ends it, the ranks may be anywhere, so they tell one another nothing.
    """
    site = runtime.site
    own_site = site.device, platform.node(), cores()
    here = site.control.agree(own_site, to="record()")
    devices = [here[site.control.index(home)][0] for home in site.homes]
    machines = dict([about[1:] for about in here])
    timeline = RankTimeline(site.homes, devices, chunks, sum(machines.values()))
    recording = Recording([site.device])
    met = [_meeting(site.control) for _ in range(_TIMES)]
    runtime.counters.start_recording(recording)
    try:
        yield timeline
    finally:
        runtime.counters.stop_recording(recording)
    layers = {j: recording.layer_seconds(j, len(part)) for j, part in runtime.modules.items()}
    dates = [recording.origin.date(moment, _CPU) for moment in met]
    own = _Part(recording.events(), layers, recording.steps, recording.failed, dates)
    parts = site.control.agree(own, to="the end of record()")
    timeline.fill([parts[site.control.index(rank)] for rank in sorted(set(site.homes))])


def _meeting(control: Control) -> float:
    control.agree(None)
    return perf_counter()


def _waits(events: Sequence[Event], workers: Sequence[int]) -> list[Event]:
    """When each rank waited for another. Of a backward in two halves, the first is waited for."""
    tasks = [event for event in events if event.kind in (FORWARD, BACKWARD)]
    done: dict[tuple[str, int, int, int], float] = {}
    begins: dict[int, float] = {}
    for task in tasks:
        done.setdefault((task.kind, task.run, task.i, task.j), task.end)
        begins.setdefault(task.run, task.start)
    free: dict[int, float] = {}
    found = []
    for task in tasks:
        rank, origin = workers[task.j], task.j + (-1 if task.kind == FORWARD else 1)
        start = max(free.get(rank, 0.0), begins[task.run])
        end = min(done.get((task.kind, task.run, task.i, origin), start), task.start)
        if start < end and workers[origin] != rank:
            about = WAIT, task.i, task.j, task.device, start, end, task.run
            found.append(Event(*about, origin=origin))
        free[rank] = task.end
    return found


def _apart(events: Sequence[Event]) -> Iterator[Event]:
    """Cut backwards in pieces around the recomputations in them."""
    again: dict[tuple[int, int, int], list[Event]] = {}
    for event in events:
        if event.kind == RECOMPUTE:
            again.setdefault((event.run, event.i, event.j), []).append(event)
    for event in events:
        if event.kind == BACKWARD:
            for inner in again.get((event.run, event.i, event.j), ()):
                yield replace(event, end=inner.start)
                event = replace(event, start=inner.end)
        yield event
