"""What would make a pipe faster, from what its partitions were seen to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipert.balance.by_cost import balance_by_cost

__all__ = ["Advice", "Costs"]

_WORTH = 0.03  # what saves less is not mentioned
_MUCH_RECOMPUTATION = 0.1
_MUCH_OUTSIDE = 0.3
_SHORT = 300e-6  # s; a task that takes no longer is not much longer than what runs it


@dataclass(frozen=True, slots=True)
class Costs:
    """What one partition takes for a micro-batch, in seconds; medians of its tasks."""

    forward: float
    recompute: float
    """Shared out among all micro-batches, those that are not recomputed included."""
    backward: float

    @property
    def whole(self) -> float:
        """There and back."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    text: str
    gain: float
    """The share of the pipe's time that it would save at most, from 0 to 1; 0 if unknown."""


def advise(
    m: int,
    costs: Sequence[Costs],
    lanes: Sequence[str],
    workers: Sequence[int],
    devices: Sequence[torch.device],
    layers: Sequence[Sequence[float]] | None,
    outside: float,
) -> tuple[Advice, ...]:
    """What is worth to be done, the largest gain first.

    Args:
        m: micro-batches of a call.
        costs: of each partition.
        lanes: the names of the workers.
        workers: the worker of each partition.
        devices: of each partition.
        layers: seconds that each layer of each partition takes in a forward task, if known.
        outside: the share of time in which the pipe was not at work.
    """
    found = [
        *_balance(_pipelined(costs, devices), lanes, workers, layers),
        *_chunks(m, len(lanes)),
        *_short_tasks(costs),
        *_recomputation(costs),
        *_one_thread(costs, devices),
    ]
    if outside > _MUCH_OUTSIDE:
        found.append(
            Advice(
                f"{100 * outside:.0f}% of the time the pipe was not at work: look at the loss, the "
                "optimizer and the data",
                0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.gain))


def _pipelined(costs: Sequence[Costs], devices: Sequence[torch.device]) -> list[float]:
    """What of the costs partitions do at the same time: on CPU one thread does all backwards."""
    return [
        cost.forward if device.type == "cpu" else cost.whole
        for cost, device in zip(costs, devices, strict=True)
    ]


def _balance(
    costs: Sequence[float],
    lanes: Sequence[str],
    workers: Sequence[int],
    layers: Sequence[Sequence[float]] | None,
) -> Iterator[Advice]:
    slowest = max(range(len(costs)), key=lambda j: costs[j])
    mean = sum(costs) / len(costs)
    if len(costs) == 1 or costs[slowest] < (1 + _WORTH) * mean:
        return
    text = (
        f"partition {slowest} on {lanes[workers[slowest]]} is the slowest: "
        f"{1e3 * costs[slowest]:.2f} ms for a micro-batch, {costs[slowest] / mean:.2f} of the mean"
    )
    if layers is None:
        yield Advice(f"{text}; balance_by_time finds a better balance", 1 - mean / costs[slowest])
        return
    each = _layer_costs(costs, layers)
    now, better = [len(of) for of in layers], balance_by_cost(each, len(costs))
    gain = 1 - _longest(each, better) / _longest(each, now)
    if gain < _WORTH:
        yield Advice(f"{text}, and no other balance is much better: split its largest layer", 0.0)
    else:
        yield Advice(
            f"{text}; balance={better} instead of {now} makes the slowest one "
            f"{100 * gain:.0f}% faster, by the forward times of the layers",
            gain,
        )


def _layer_costs(costs: Sequence[float], layers: Sequence[Sequence[float]]) -> list[float]:
    """What each layer takes of its partition's cost, as its forward does of the partition's."""
    each: list[float] = []
    for cost, of_partition in zip(costs, layers, strict=True):
        whole = sum(of_partition)
        even = 1 / len(of_partition)
        each += [cost * (took / whole if whole else even) for took in of_partition]
    return each


def _longest(costs: Sequence[float], balance: Sequence[int]) -> float:
    ends = [sum(balance[: j + 1]) for j in range(len(balance))]
    return max(sum(costs[end - count : end]) for end, count in zip(ends, balance, strict=True))


def _chunks(m: int, n: int) -> Iterator[Advice]:
    now, then = (m + n - 1) / m, (2 * m + n - 1) / (2 * m)
    gain = 1 - then / now
    if gain >= _WORTH:
        yield Advice(
            f"chunks={2 * m} instead of {m} would save {100 * gain:.0f}% at most: if half the rows "
            "take half the time",
            gain,
        )


def _short_tasks(costs: Sequence[Costs]) -> Iterator[Advice]:
    shortest = min(cost.forward for cost in costs)
    if shortest < _SHORT:
        yield Advice(
            f"forward tasks take as little as {1e6 * shortest:.0f} us, and running one costs the "
            "interpreter 50 to 200: fewer chunks, or fewer partitions, may be faster",
            0.0,
        )


def _recomputation(costs: Sequence[Costs]) -> Iterator[Advice]:
    share = sum(cost.recompute for cost in costs) / sum(cost.whole for cost in costs)
    if share > _MUCH_RECOMPUTATION:
        yield Advice(
            f"{100 * share:.0f}% of what is computed is recomputed: checkpoint='never' saves that, "
            "if there is memory for all activations",
            share,
        )


def _one_thread(costs: Sequence[Costs], devices: Sequence[torch.device]) -> Iterator[Advice]:
    on_cpu = sum(device.type == "cpu" for device in devices)
    if on_cpu > 1 and any(cost.backward for cost in costs):
        yield Advice(
            f"the backward of the {on_cpu} partitions on CPU runs in one thread of autograd, "
            "whatever their balance",
            0.0,
        )
