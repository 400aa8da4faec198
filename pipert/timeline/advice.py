"""Suggests changes that make a pipe faster, by predicting a step with and without each of them.

The prediction simulates a step with the measured times of its tasks. Forward tasks run in the
clock's order, each when its input has arrived and its worker is free. The backward runs in reverse:
each device runs its part when it is free, or, on CPU, one autograd thread runs the parts of all
partitions one after the other. A schedule that interleaves forward and backward takes as long as
one that does not, if partitions are alike. Gradients of weights that a schedule puts off fill the
time in which a device would wait. Copies are free. The loss, the optimizer and the data
are left out. Nothing is predicted for more CPU workers than there are cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice

import torch

from pipert.balance.by_cost import balance_by_cost
from pipert.schedules.plan import plan_call
from pipert.schedules.simulate import simulate

__all__ = ["Advice", "Costs"]

_WORTHWHILE = 0.05  # smaller savings are within the noise of the measurements
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

    def times(self, factor: float) -> Costs:
        """Returns the costs multiplied by ``factor``."""
        return Costs(*(factor * seconds for seconds in astuple(self)))


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
class Observations:
    """The observations that advice is derived from."""

    m: int
    """The usual number of micro-batches per call."""
    chunks: int | None
    """The requested number of micro-batches."""
    costs: Sequence[Costs]
    lanes: Sequence[str]
    workers: Sequence[int]
    devices: Sequence[torch.device]
    layers: Sequence[Sequence[float]] | None
    outside: float
    """The share of time in which the pipe was not at work."""
    one_thread: bool
    """Whether one thread runs the backward of all partitions."""

    def predict_step(self, m: int | None = None, costs: Sequence[Costs] | None = None) -> float:
        """Predicts the seconds from the first forward to the last backward task of a step."""
        m, costs = m or self.m, costs or self.costs
        forward = [cost.forward for cost in costs]
        backward = [cost.recompute + cost.backward for cost in costs]
        workers = [0] * len(costs) if self.one_thread else self.workers
        there_and_back = _last_end(m, forward, self.workers)
        there_and_back += _last_end(m, backward[::-1], workers[::-1])
        return max(there_and_back, *self._ends_of_work(m, costs))

    def _ends_of_work(self, m: int, costs: Sequence[Costs]) -> Iterator[float]:
        """Returns when each worker would be done, if it waited for nothing but its first input."""
        for worker in set(self.workers):
            own = [j for j, other in enumerate(self.workers) if other == worker]
            arrival = sum(cost.forward for cost in costs[: own[0]])
            yield arrival + m * sum(costs[j].whole for j in own)


def _last_end(m: int, seconds: Sequence[float], workers: Sequence[int]) -> float:
    """Returns the time at which the last of ``m`` micro-batches has left the last partition."""
    clock = plan_call(m, len(seconds), workers)
    return max(end for _, end in simulate(clock, lambda action: seconds[action.j]).values())


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
    """Returns the worthwhile changes, largest gain first."""
    found = [*_outside(seen), *(crowded := [*_cores(seen)])]
    if not crowded and all(cost.forward > 0 for cost in seen.costs):  # each partition has run
        found += [*_balance(seen), *_checkpoint(seen), *([*_short_tasks(seen)] or _chunks(seen))]
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _balance(seen: Observations) -> Iterator[Advice]:
    n = len(seen.costs)
    cpus = sum(device.type == "cpu" for device in seen.devices)
    if n == 1 or len(seen.lanes) < n or seen.m == 1 or 0 < cpus < n:
        return  # nothing to move, nothing to gain, or devices of different types
    # Only the work that partitions do concurrently: on CPU the forward.
    sizes = [cost.forward if seen.one_thread else cost.whole for cost in seen.costs]
    slowest = max(range(n), key=sizes.__getitem__)
    if sizes[slowest] * n < (1 + _WORTHWHILE) * sum(sizes):
        return
    where = " in the forward" if seen.one_thread else ""
    text = (
        f"partition {slowest} on {seen.lanes[seen.workers[slowest]]} is the slowest{where}: "
        f"{1e3 * sizes[slowest]:.2f} ms for a micro-batch, {sizes[slowest] * n / sum(sizes):.2f} "
        "of the mean"
    )
    if seen.layers is None:
        yield Advice("balance", f"{text}; balance_by_time finds a better balance")
        return
    current = [len(seconds) for seconds in seen.layers]
    layers = _layer_costs(seen.costs, seen.layers)
    better = balance_by_cost([c.forward if seen.one_thread else c.whole for c in layers], n)
    gain = 1 - seen.predict_step(costs=_partition_costs(layers, better)) / seen.predict_step()
    if gain < _WORTHWHILE:
        yield Advice("balance", f"{text}, and no other balance of these layers saves much")
    else:
        text = f"{text}; balance={better} instead of {current} {_saves(gain)}"
        yield Advice("balance", text, gain, tuple(better))


def _layer_costs(costs: Sequence[Costs], layers: Sequence[Sequence[float]]) -> list[Costs]:
    """Divides each partition's cost among its layers in proportion to their forward times."""
    divided: list[Costs] = []
    for cost, layer_seconds in zip(costs, layers, strict=True):
        total, even = sum(layer_seconds), 1 / len(layer_seconds)
        divided += [cost.times(seconds / total if total else even) for seconds in layer_seconds]
    return divided


def _partition_costs(costs: Sequence[Costs], balance: Sequence[int]) -> list[Costs]:
    """Adds up the layers' costs in each partition of ``balance``."""
    layers = iter(map(astuple, costs))
    each = [zip(*islice(layers, count), strict=True) for count in balance]
    return [Costs(*map(sum, kinds)) for kinds in each]


def _chunks(seen: Observations) -> Iterator[Advice]:
    if seen.chunks is not None and seen.m < seen.chunks:
        return  # there were no more rows
    m = 2 * seen.m
    gain = 1 - seen.predict_step(m, [cost.times(0.5) for cost in seen.costs]) / seen.predict_step()
    if gain >= _WORTHWHILE:
        text = f"chunks={m} instead of {seen.m} {_saves(gain)}, if half the rows take half the time"
        yield Advice("chunks", text, gain, m)


def _short_tasks(seen: Observations) -> Iterator[Advice]:
    shortest = min(cost.forward for cost in seen.costs)
    if shortest < _SHORT and (seen.m > 1 or len(seen.costs) > 1):
        fewer = "fewer chunks" if seen.m > 1 else "fewer partitions"
        text = (
            f"forward tasks take as little as {1e6 * shortest:.0f} us, and running one costs the "
            f"interpreter 50 to 200: {fewer} may be faster"
        )
        yield Advice("short tasks", text)


def _cores(seen: Observations) -> Iterator[Advice]:
    cores = os.cpu_count() or 1
    if all(device.type == "cpu" for device in seen.devices) and len(seen.lanes) > cores:
        text = (
            f"{len(seen.lanes)} CPU workers share {cores} core{'s' * (cores != 1)}: as many "
            "partitions as cores may be faster, or more cores"
        )
        yield Advice("cores", text)


def _checkpoint(seen: Observations) -> Iterator[Advice]:
    never = [replace(cost, recompute=0.0) for cost in seen.costs]
    gain = 1 - seen.predict_step(costs=never) / seen.predict_step()
    if gain >= _WORTHWHILE:
        text = f"checkpoint='never' {_saves(gain)}, if there is memory for all activations"
        yield Advice("checkpoint", text, gain, "never")


def _outside(seen: Observations) -> Iterator[Advice]:
    if seen.outside > _MUCH_OUTSIDE:
        text = (
            f"{100 * seen.outside:.0f}% of the time the pipe was not at work: look at the loss, the"
            " optimizer and the data"
        )
        yield Advice("outside", text)


def _saves(gain: float) -> str:
    return f"would save about {100 * gain:.0f}% of a step"
