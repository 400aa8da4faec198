"""How long a step would take, from what its tasks take: what advice is measured by.

Forward tasks are done in the clock's order, each when its input is there and its worker free. A
backward goes the opposite way: each device does its part when it is free, or, on CPU, one thread of
autograd does the parts of all partitions, one after the other. A step that goes forward and back
at once takes as long as one that does so in turn, if partitions are alike. Copies are free. The
loss, the optimizer and the data are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipert.schedules.plan import plan_call
from pipert.schedules.simulate import simulate

__all__ = ["Costs"]


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

    def times(self, factor: float) -> Costs:
        """Of that share of it."""
        return Costs(self.forward * factor, self.recompute * factor, self.backward * factor)

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.forward + other.forward,
            self.recompute + other.recompute,
            self.backward + other.backward,
        )


def step_seconds(
    m: int, costs: Sequence[Costs], workers: Sequence[int], one_thread: bool
) -> float:
    """From the first forward to the last backward task of ``m`` micro-batches.

    ``one_thread``: of autograd does the backward of all partitions.
    """
    n = len(costs)
    there = _last_end(m, [cost.forward for cost in costs], workers)
    back = [cost.recompute + cost.backward for cost in costs]
    return there + _last_end(m, back[::-1], [0] * n if one_thread else workers[::-1])


def _last_end(m: int, seconds: Sequence[float], workers: Sequence[int]) -> float:
    """When the last of ``m`` micro-batches has gone through all partitions."""
    clock = plan_call(m, len(seconds), workers)
    return max(end for _, end in simulate(clock, lambda action: seconds[action.j]).values())
