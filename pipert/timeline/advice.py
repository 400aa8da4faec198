"""Says what holds a pipe back. ``plan_for`` predicts what would be faster, from its layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Advice", "Costs"]

_MUCH = 0.05  # smaller shares are within the noise of the measurements
_MUCH_OUTSIDE = 0.3
_SHORT = 300e-6  # s; such a task takes little longer than the overhead of running it


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of a micro-batch in one partition, in seconds: the medians of its tasks."""

    forward: float
    recompute: float
    """Spread over all micro-batches, including those that are not recomputed."""
    backward: float
    weight: float = 0.0
    """The gradients of weights that a schedule puts off."""

    @property
    def whole(self) -> float:
        """The sum of forward, recomputation, backward and what that puts off."""
        return self.forward + self.recompute + self.backward + self.weight


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing that holds the pipe back, and what may help."""

    kind: str
    """``'outside'``, ``'cores'``, ``'balance'``, ``'short tasks'``, ``'plan'`` or ``'chunks'``."""
    text: str


@dataclass(frozen=True, slots=True)
class Observations:
    """The observations that advice is derived from."""

    m: int
    """The usual number of micro-batches per call."""
    costs: Sequence[Costs]
    lanes: Sequence[str]
    workers: Sequence[int]
    devices: Sequence[torch.device]
    outside: float
    """The share of time in which the pipe was not at work."""
    one_thread: bool
    """Whether one thread runs the backward of all partitions."""
    bubble: float
    """The share of the devices' time in which they waited."""
    recomputing: float
    """The share in which they recomputed."""


def ideal_bubble(m: int, n: int, costs: Sequence[Costs]) -> float:
    """Returns the bubble that ``n`` devices with equal partitions and free copies would have.

    The last device waits for its first input, and the first one for the last gradient, unless what
    was put off fills that time.
    """
    if not any(cost.weight for cost in costs):
        return (n - 1) / (m + n - 1)
    forward = sum(cost.forward for cost in costs) / len(costs)
    weight = sum(cost.weight for cost in costs) / len(costs)
    backward = sum(cost.whole for cost in costs) / len(costs) - forward - weight
    each = m * len(costs) / n  # the micro-batches of each device, counted once per partition
    idle = (n - 1) * forward + max(0.0, (n - 1) * backward - (each - 1) * weight)
    return idle / (idle + each * (forward + backward + weight))


def advise(seen: Observations) -> tuple[Advice, ...]:
    """Returns what is worth a change."""
    found = [*_outside(seen), *(crowded := [*_cores(seen)])]
    if not crowded and all(cost.forward > 0 for cost in seen.costs):  # each partition has run
        found += [*_balance(seen), *_short_tasks(seen), *_plan(seen)]
    return tuple(found)


def _outside(seen: Observations) -> Iterator[Advice]:
    if seen.outside > _MUCH_OUTSIDE:
        text = (
            f"{100 * seen.outside:.0f}% of the time the pipe was not at work: look at the loss, the"
            " optimizer and the data"
        )
        yield Advice("outside", text)


def _cores(seen: Observations) -> Iterator[Advice]:
    cores = os.cpu_count() or 1
    if all(device.type == "cpu" for device in seen.devices) and len(seen.lanes) > cores:
        text = (
            f"{len(seen.lanes)} CPU workers share {cores} core{'s' * (cores != 1)}: as many "
            "partitions as cores may be faster, or more cores"
        )
        yield Advice("cores", text)


def _balance(seen: Observations) -> Iterator[Advice]:
    n = len(seen.costs)
    cpus = sum(device.type == "cpu" for device in seen.devices)
    if n == 1 or len(seen.lanes) < n or 0 < cpus < n:
        return  # nothing to move, or devices of different types
    # Only the work that partitions do concurrently: on CPU the forward.
    sizes = [cost.forward if seen.one_thread else cost.whole for cost in seen.costs]
    slowest = max(range(n), key=sizes.__getitem__)
    if sizes[slowest] * n >= (1 + _MUCH) * sum(sizes):
        where = " in the forward" if seen.one_thread else ""
        text = (
            f"partition {slowest} on {seen.lanes[seen.workers[slowest]]} is the slowest{where}: "
            f"{1e3 * sizes[slowest]:.2f} ms for a micro-batch, "
            f"{sizes[slowest] * n / sum(sizes):.2f} of the mean"
        )
        yield Advice("balance", text)


def _short_tasks(seen: Observations) -> Iterator[Advice]:
    shortest = min(cost.forward for cost in seen.costs)
    if shortest < _SHORT and (seen.m > 1 or len(seen.costs) > 1):
        fewer = "fewer chunks" if seen.m > 1 else "fewer partitions"
        text = (
            f"forward tasks take as little as {1e6 * shortest:.0f} us, and running one costs the "
            f"interpreter 50 to 200: {fewer} may be faster"
        )
        yield Advice("short tasks", text)


def _plan(seen: Observations) -> Iterator[Advice]:
    if max(seen.bubble, seen.recomputing) >= _MUCH:
        text = (
            f"devices waited for {100 * seen.bubble:.0f}% of their time and recomputed for "
            f"{100 * seen.recomputing:.0f}%: pipert.plan_for searches the balance, chunks, "
            "schedule and checkpoint of the fastest step that fits the memory"
        )
        yield Advice("plan", text)
