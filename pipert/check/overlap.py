"""Checks that devices copy while they compute, and that partitions compute at the same time.

Whether copies *can* run beside kernels follows from how streams are used, and is checked for each
pair of neighbours. Timing must not matter, so the host controls the order of queueing, and
kernels that only sleep fix the durations::

    first GPU     F[0,0]  F[1,0]  F[2,0] sleeps ...................  F[3,0]
    copy                          F[1,0]'s output: when is it there?
    second GPU    F[0,1] sleeps for longer .............................

``F[1,1]`` queues the copy of micro-batch 1. Its worker is held until ``F[3,0]`` begins, so
``F[2,0]`` has been queued by then. On a stream of its own the copy completes while both GPUs sleep;
on either GPU's compute stream it waits for the kernel there. A delay of the *host* can only hide an
overlap, never fake one, so failures are retried with longer sleeps, and one success is enough.

How much *does* overlap in a step, with real kernels, depends on the machine. The figure comes
from ``pipe.record()`` and is only reported. But if on two or more GPUs no two partitions ever
compute at the same time, though their tasks are long enough to tell, something serialises them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import combinations
from statistics import median_high

import torch
from torch import Tensor, nn

from pipert.check.finding import BROKEN, NOT_CHECKED, REPORTED, Finding, Found, Measurement, judged
from pipert.check.links import links, why_no_links
from pipert.check.load import Load
from pipert.check.ways import NEVER, TIMEOUT, Devices
from pipert.observe.event import COMPUTE, COPY, FORWARD
from pipert.timeline.intervals import length, overlap, times_of, union
from pipert.timeline.timeline import Timeline

__all__: list[str] = []

SLEEP = 50_000_000  # cycles, some 25 to 50 ms
ATTEMPTS = 4
LONG_ENOUGH = 1e-3  # seconds per task: clocks of two GPUs agree to some 50 us
NEGLIGIBLE = 0.01  # share of the time
COPIES_MEAN = "copies wait for computation and it for them: training is slower than it has to be"
PARTITIONS_MEAN = "the GPUs take turns, so there is no gain from having several of them"

# Copies beside kernels ----------------------------------------------------------------------------


def check_copies(devices: Devices) -> Iterator[Finding]:
    """Check the copies between each pair of consecutive GPUs."""
    check = "copies beside computation"
    reason = why_no_links(devices) or _why_not_side_by_side()
    if reason is not None:
        yield Finding(check, NOT_CHECKED, reason)
        return
    pairs = links(devices)
    faults = [
        f"from {a} to {b} in none of {ATTEMPTS} attempts" for a, b in pairs if not _overlap(a, b)
    ]
    seen = f"while both GPUs compute: {', '.join(f'{a} to {b}' for a, b in pairs)}"
    yield judged(check, faults, seen, COPIES_MEAN)


class _Sleeping(nn.Module):
    """A layer whose kernel sleeps on micro-batch ``at``; the host is held after ``F[0,1]``."""

    def __init__(self, at: int, queued: threading.Event) -> None:
        super().__init__()
        self.at, self.queued = at, queued
        self.cycles = self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.calls = self.calls, self.calls + 1
        if i == 3:
            self.queued.set()  # in F[3,0]; in F[3,1] it no longer matters
        torch.cuda._sleep(self.cycles if i == self.at else 1)  # type: ignore[no-untyped-call]
        if i == self.at == 0 and not self.queued.wait(TIMEOUT / 2):
            raise RuntimeError("F[3,0] did not begin while F[0,1] was under way")
        return x + 1


def _overlap(a: torch.device, b: torch.device) -> bool:
    """Returns whether micro-batch 1 arrives at ``b`` before ``a`` finishes the next one."""
    queued = threading.Event()
    first, second = _Sleeping(2, queued), _Sleeping(0, queued)
    two = Devices((a, b))
    with two.pipe(nn.Sequential(first, second), 4) as pipe, torch.no_grad():
        x = torch.ones(4, 1 << 16, device=a)
        # Two short rounds first, for everything that makes the driver wait for kernels: allocating
        # memory, loading code, enabling peer access.
        for cycles in (1, 1, *(SLEEP * 2**attempt for attempt in range(ATTEMPTS))):
            queued.clear()
            first.calls = second.calls = 0
            first.cycles, second.cycles = cycles, 3 * cycles
            two.synchronize()
            with pipe.record() as timeline:
                pipe(x)
            found = {(e.kind, e.micro_batch, e.partition): e for e in timeline.events}
            # The first GPU timestamps both.
            if cycles > 1 and found[COPY, 1, 1].end < found[FORWARD, 2, 0].end:
                return True
    return False


# What a step looks like ---------------------------------------------------------------------------


def check(devices: Devices, load: Load) -> Iterator[Found]:
    """Measures how much of a step partitions compute concurrently, and copy while computing."""
    rows, shares, task_seconds = [], [], []
    with devices.trial(load.model()) as trial:
        for way in NEVER:
            trial.step(way)
            devices.synchronize()
            with trial.pipe.record() as timeline:
                trial.step(way)
                trial.step(way)
                devices.synchronize()
            share = _together(timeline)
            copying, hidden = _hidden(timeline)
            forward = median_high(e.seconds for e in timeline.events if e.kind == FORWARD)
            shares.append(share)
            task_seconds.append(forward)
            copies = f"{hidden / copying:.0%} of {1e3 * copying:.1f} ms" if copying else "no copies"
            rows.append((way.schedule, f"{1e3 * forward:.2f}", f"{share:.0%}", copies))
    columns = ("schedule", "forward task, ms", "partitions at once", "copies while computing")
    title = f"Two steps of a chain: {load}, checkpoint='never'"
    yield Measurement(title, columns, tuple(rows))
    seen = f"{min(shares):.0%} to {max(shares):.0%} of the time two or more partitions compute"
    yield _judge_together(devices, max(shares), min(task_seconds), seen)


def _judge_together(devices: Devices, share: float, task: float, seen: str) -> Finding:
    """Makes the finding from the largest share and the seconds of the shortest task."""
    check = "partitions at the same time"
    if len(devices.gpus) < 2:
        seen += f"; not judged: {why_no_links(devices)}"
    elif torch.device("cpu") in devices.partitions:
        seen += "; not judged: a CPU takes part"
    elif task < LONG_ENOUGH:
        seen += "; not judged: tasks are too short to tell"
    elif share < NEGLIGIBLE:
        return Finding(check, BROKEN, seen, PARTITIONS_MEAN)
    return Finding(check, REPORTED, seen)


def _why_not_side_by_side() -> str | None:
    """Returns which setting of the user, if any, keeps kernels and copies apart."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        if os.environ.get(name) == "1":
            return f"{name}=1 keeps apart what could run side by side"
    return None


def _together(timeline: Timeline) -> float:
    """Returns the share of computing time in which two or more lanes compute."""
    numbers = range(len(timeline.lanes))
    events = timeline.events
    lanes = [times_of((e for e in events if timeline.lane(e) == k), COMPUTE) for k in numbers]
    several = union(both for a, b in combinations(lanes, 2) for both in overlap(a, b))
    return length(several) / max(length(union(sum(lanes, []))), 1e-9)


def _hidden(timeline: Timeline) -> tuple[float, float]:
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
