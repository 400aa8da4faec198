"""Suggests what would make a pipe faster, by predicting a step with and without each change.

A step is predicted from what its tasks take. Forward tasks are done in the clock's order, each when
its input is there and its worker free. A backward goes the opposite way: each device does its part
when it is free, or, on CPU, one thread of autograd does the parts of all partitions, one after the
other. A step that goes forward and back at once takes as long as one that does so in turn, if
partitions are alike. CPU workers do no more at a time than their cores can. Copies are free. The
loss, the optimizer and the data are not in it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from pipert.balance.by_cost import balance_by_cost
from pipert.schedules.plan import plan_call
from pipert.schedules.simulate import simulate

__all__ = ["Advice", "Costs"]

_WORTH = 0.05  # smaller savings are within the noise of the measurements
_MUCH_OUTSIDE = 0.3
_SHORT = 300e-6  # s; such a task takes little longer than the overhead of running it


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of a micro-batch in one partition, in seconds; medians of its tasks."""

    forward: float
    recompute: float
    """Spread over all micro-batches, including those that are not recomputed."""
    backward: float

    @property
    def whole(self) -> float:
        """The sum: forward, recomputation and backward."""
        return self.forward + self.recompute + self.backward

    def times(self, factor: float) -> Costs:
        """Multiply each cost by ``factor``."""
        return Costs(self.forward * factor, self.recompute * factor, self.backward * factor)

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.forward + other.forward,
            self.recompute + other.recompute,
            self.backward + other.backward,
        )


@dataclass(frozen=True, slots=True)
class Advice:
    """One suggestion for a faster step."""

    kind: str
    """``'balance'``, ``'chunks'``, ``'checkpoint'``, ``'short tasks'``, ``'cores'`` or
    ``'outside'``."""
    text: str
    gain: float = 0.0
    """The predicted saving as a share of a step, from 0 to 1; 0 if unknown."""
    value: object = None
    """The value to set: a balance, a number of chunks, a checkpoint mode."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The observations that advice is derived from."""

    m: int
    """The usual number of micro-batches per call."""
    chunks: int | None
    """The number requested."""
    costs: Sequence[Costs]
    lanes: Sequence[str]
    workers: Sequence[int]
    devices: Sequence[torch.device]
    layers: Sequence[Sequence[float]] | None
    outside: float
    """The share of time in which the pipe was not at work."""
    one_thread: bool
    """Whether one thread runs the backward of all partitions."""
    cores: int
    """How many this process may use."""

    @property
    def at_once(self) -> float:
        """How many workers can compute at the same time, each on its share of threads."""
        if any(device.type != "cpu" for device in self.devices):
            return math.inf
        return max(1.0, self.cores / max(1, torch.get_num_threads() // len(self.lanes)))

    def step(self, m: int | None = None, costs: Sequence[Costs] | None = None) -> float:
        """Predicts the seconds from the first forward to the last backward task of a step."""
        m, costs = m or self.m, costs or self.costs
        there = [cost.forward for cost in costs]
        back = [cost.recompute + cost.backward for cost in costs]
        workers = [0] * len(costs) if self.one_thread else self.workers
        ends = _last_end(m, there, self.workers), _last_end(m, back[::-1], workers[::-1])
        least = [m * sum(seconds) / self.at_once for seconds in (there, back)]
        return sum(map(max, ends, least))


def _last_end(m: int, seconds: Sequence[float], workers: Sequence[int]) -> float:
    """When the last of ``m`` micro-batches has gone through all partitions."""
    clock = plan_call(m, len(seconds), workers)
    return max(end for _, end in simulate(clock, lambda action: seconds[action.j]).values())


def advise(seen: Seen) -> tuple[Advice, ...]:
    """Returns the worthwhile changes, largest gain first."""
    found = list(_outside(seen))
    if all(cost.forward > 0 for cost in seen.costs):  # each partition has run
        found += [*_balance(seen), *_checkpoint(seen)]
        short = list(_short_tasks(seen))
        found += [*(short or _chunks(seen)), *_cores(seen)]
    return tuple(sorted(found, key=lambda one: -one.gain))


def _balance(seen: Seen) -> Iterator[Advice]:
    n = len(seen.costs)
    cpus = sum(device.type == "cpu" for device in seen.devices)
    if n == 1 or len(seen.lanes) < n or seen.m == 1 or 0 < cpus < n:
        return  # nothing to move, nothing to gain, or unlike devices
    # What partitions do concurrently: on CPU only the forward.
    sizes = [cost.forward if seen.one_thread else cost.whole for cost in seen.costs]
    slowest = max(range(n), key=lambda j: sizes[j])
    where = " in the forward" if seen.one_thread else ""
    text = (
        f"partition {slowest} on {seen.lanes[seen.workers[slowest]]} is the slowest{where}: "
        f"{1e3 * sizes[slowest]:.2f} ms for a micro-batch, {sizes[slowest] * n / sum(sizes):.2f} "
        "of the mean"
    )
    if sizes[slowest] * n < (1 + _WORTH) * sum(sizes):
        return
    if seen.layers is None:
        yield Advice("balance", f"{text}; balance_by_time finds a better balance")
        return
    now = [len(of_partition) for of_partition in seen.layers]
    each = _layer_costs(seen.costs, seen.layers)
    better = balance_by_cost([one.forward if seen.one_thread else one.whole for one in each], n)
    gain = 1 - seen.step(costs=_blocks(each, better)) / seen.step()
    if gain < _WORTH:
        yield Advice("balance", f"{text}, and no other balance of these layers saves much")
    else:
        text = f"{text}; balance={better} instead of {now} {_saves(gain)}"
        yield Advice("balance", text, gain, tuple(better))


def _layer_costs(costs: Sequence[Costs], layers: Sequence[Sequence[float]]) -> list[Costs]:
    """Divides each partition's cost among its layers in proportion to their forward times."""
    each: list[Costs] = []
    for cost, of_partition in zip(costs, layers, strict=True):
        whole, even = sum(of_partition), 1 / len(of_partition)
        each += [cost.times(took / whole if whole else even) for took in of_partition]
    return each


def _blocks(costs: Sequence[Costs], balance: Sequence[int]) -> list[Costs]:
    ends = list(accumulate(balance))
    return [
        sum(costs[end - count : end], Costs(0.0, 0.0, 0.0))
        for end, count in zip(ends, balance, strict=True)
    ]


def _chunks(seen: Seen) -> Iterator[Advice]:
    if seen.chunks is not None and seen.m < seen.chunks:
        return  # there were no more rows
    m = 2 * seen.m
    gain = 1 - seen.step(m, [cost.times(0.5) for cost in seen.costs]) / seen.step()
    if gain >= _WORTH:
        text = f"chunks={m} instead of {seen.m} {_saves(gain)}, if half the rows take half the time"
        yield Advice("chunks", text, gain, m)


def _short_tasks(seen: Seen) -> Iterator[Advice]:
    shortest = min(cost.forward for cost in seen.costs)
    if shortest < _SHORT and (seen.m > 1 or len(seen.costs) > 1):
        fewer = "fewer chunks" if seen.m > 1 else "fewer partitions"
        text = (
            f"forward tasks take as little as {1e6 * shortest:.0f} us, and running one costs the "
            f"interpreter 50 to 200: {fewer} may be faster"
        )
        yield Advice("short tasks", text)


def _cores(seen: Seen) -> Iterator[Advice]:
    if len(seen.lanes) > seen.at_once:
        text = (
            f"{len(seen.lanes)} CPU workers share {seen.cores} core{'s' * (seen.cores != 1)}: as "
            "many partitions as cores may be faster, or more cores"
        )
        yield Advice("cores", text)


def _checkpoint(seen: Seen) -> Iterator[Advice]:
    never = [replace(cost, recompute=0.0) for cost in seen.costs]
    gain = 1 - seen.step(costs=never) / seen.step()
    if gain >= _WORTH:
        text = f"checkpoint='never' {_saves(gain)}, if there is memory for all activations"
        yield Advice("checkpoint", text, gain, "never")


def _outside(seen: Seen) -> Iterator[Advice]:
    if seen.outside > _MUCH_OUTSIDE:
        text = (
            f"{100 * seen.outside:.0f}% of the time the pipe was not at work: look at the loss, the"
            " optimizer and the data"
        )
        yield Advice("outside", text)


def _saves(gain: float) -> str:
    return f"would save about {100 * gain:.0f}% of a step"
