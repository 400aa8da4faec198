"""Checks that partitions compute at the same time, and that devices copy while they compute.

How much overlaps in a step depends on the machine, so the figures of ``pipe.record()`` are only
reported. But if no two partitions ever compute at the same time on two or more GPUs, though their
tasks are long enough to tell, something serialises them: this does not hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations
from statistics import median_high

import torch

from pipert.check.finding import BROKEN, REPORTED, Finding
from pipert.check.models import Case
from pipert.check.ways import NEVER, Devices
from pipert.observe.event import COMPUTE, FORWARD
from pipert.timeline.intervals import length, overlap, times_of, union
from pipert.timeline.timeline import Timeline

__all__: list[str] = []

LONG_ENOUGH = 1e-3  # seconds per task: clocks of two GPUs agree to some 50 us
NEGLIGIBLE = 0.01  # share of the time
MEANS = "the GPUs take turns, so there is no gain from having several of them"


def check(devices: Devices, case: Case) -> Iterator[Finding]:
    """Measures how much of a step partitions compute concurrently, and copy while computing."""
    together, hidden, forwards = [], [], []
    with devices.trial(case) as trial:
        for way in NEVER:
            trial.step(way)
            devices.synchronize()
            with trial.pipe.record() as timeline:
                trial.step(way)
                trial.step(way)
                devices.synchronize()
            forwards.append(median_high(e.seconds for e in timeline.events if e.kind == FORWARD))
            together.append(_together(timeline))
            copying, beside = _copying(timeline)
            if copying:
                hidden.append(beside / copying)
    yield judge(devices, together, min(forwards), case.name)
    if hidden:
        seen = f"{min(hidden):.0%} to {max(hidden):.0%} of the time of copies their source computes"
        yield Finding("copies while computing", REPORTED, seen)


def why_not_judged(devices: Devices, forward: float) -> str:
    """Returns why there may be no overlap, though nothing is wrong; empty if there is no reason."""
    reasons = {
        "there are no two GPUs": len(devices.gpus) < 2,
        "a CPU takes part": torch.device("cpu") in devices.partitions,
        "tasks are too short to tell": forward < LONG_ENOUGH,
        "CUDA_LAUNCH_BLOCKING is set": os.environ.get("CUDA_LAUNCH_BLOCKING") == "1",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def judge(devices: Devices, shares: list[float], forward: float, what: str) -> Finding:
    """Makes the finding from the shares of all schedules, and the time of a forward task."""
    check = "partitions at the same time"
    seen = f"{min(shares):.0%} to {max(shares):.0%} of the time two or more compute ({what})"
    excuse = why_not_judged(devices, forward)
    if not excuse and max(shares) < NEGLIGIBLE:
        return Finding(check, BROKEN, seen, MEANS)
    return Finding(check, REPORTED, seen + f"; not judged: {excuse}" * bool(excuse))


def _together(timeline: Timeline) -> float:
    """Returns the share of computing time in which two or more lanes compute."""
    numbers = range(len(timeline.lanes))
    events = timeline.events
    lanes = [times_of((e for e in events if timeline.lane(e) == k), COMPUTE) for k in numbers]
    several = union(both for a, b in combinations(lanes, 2) for both in overlap(a, b))
    return length(several) / max(length(union(sum(lanes, []))), 1e-9)


def _copying(timeline: Timeline) -> tuple[float, float]:
    """Returns the seconds of copies between GPUs, in all and while their source GPU computed.

    The source GPU timestamps both.
    """
    copying = hidden = 0.0
    for copy in timeline.events:
        source = copy.source
        if source is not None and source.type == copy.device.type == "cuda":
            computing = times_of((e for e in timeline.events if e.device == source), COMPUTE)
            copying += copy.seconds
            hidden += length(overlap([(copy.start, copy.end)], computing))
    return copying, hidden
