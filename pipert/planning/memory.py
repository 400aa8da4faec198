"""Predicts each device's peak of bytes in a step, from what its partitions need one by one.

Peak of a device::

    parameters, and the optimizer's state + gradients, once there are some
    + the mini-batch, on the first device
    + micro-batches between their forward and what ends with their backward + the running task

Actions come in the order of the plan. ``F`` leaves what the backward needs, or, if the micro-batch
is recomputed, the inputs of the partition. ``R`` leaves what ``F`` would have left. ``B`` frees it
from the last layer to the first, and meanwhile makes the gradients of weights, which it returns
together; what it defers stays until ``W``.

Not predicted: fragmentation, workspaces of kernels, and what an allocator holds back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pipert.balance.cost import Cost, Sizes, total, without
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan


def peaks(
    plan: Plan, costs: Sequence[Cost], scale: float, batch: int, targets: int = 0
) -> list[int]:
    """Predict the peak of each worker's device from the costs of partitions.

    ``scale`` is the memory of a trained parameter with its ``.grad`` and the optimizer's state,
    relative to that of the parameter alone; the mini-batch is on the first device, the targets are
    on the last one.
    """
    tasks = _Tasks(plan, costs)
    live, most = Counter[int](), Counter[int]()
    for tick in plan.ticks:
        for action in tick:
            worker = plan.placement[action.j]
            most[worker] = max(most[worker], live[worker] + tasks.peak(action))
        for action in tick:
            for j, change in tasks.changes(action):
                live[plan.placement[j]] += change
    for cost, worker in zip(costs, plan.placement, strict=True):
        most[worker] += round(total(cost.parameters) + (scale - 2) * total(cost.trained))
    most[plan.placement[0]] += batch
    for worker in {plan.placement[-1], max(plan.placement)}:  # of zb-v the first one needs them
        most[worker] += targets
    return [most[worker] for worker in sorted(most)]


class _Tasks:
    """What the tasks of a step need, and what they leave."""

    def __init__(self, plan: Plan, costs: Sequence[Cost]) -> None:
        self._plan, self._costs = plan, costs
        self._defers = WEIGHT in plan.occurring_kinds
        self._begun = set[tuple[str, int]]()
        left = [(cost.saved, {**cost.inputs, **cost.kept}) for cost in costs]
        for j, device in enumerate(plan.placement):  # parts of the mini-batch are there anyway
            if device == plan.placement[0]:
                saved, kept = left[j]
                left[j] = without(saved, costs[0].inputs), without(kept, costs[0].inputs)
        self._saved = [total(saved) for saved, _ in left]
        self._kept = [total(kept) for _, kept in left]
        self._again = [total(without(cost.saved, cost.kept)) for cost in costs]
        """What a recomputation makes, beside what stays: a copy of the inputs, too."""
        self._inputs = [total(cost.inputs) for cost in costs]
        self._later = [total(cost.later) * self._defers for cost in costs]
        self._trained = [total(cost.trained) for cost in costs]
        self._crossing = [
            (source, j, total(sizes), *[total(without(sizes, own)) for own in left[source]])
            for j in range(plan.n)
            for source, sizes in self._sources(j)
        ]
        """From where to where, on another device, come how many bytes; and how many of these stay
        for this alone, if all is saved there, and if it is recomputed."""

    def _sources(self, j: int) -> Iterator[tuple[int, Sizes]]:
        left = self._costs[j].inputs
        for source in reversed(range(j)):
            outputs = self._costs[source].outputs
            yield source, {key: size for key, size in left.items() if key in outputs}
            left = without(left, outputs)

    def peak(self, action: Action) -> int:
        """Return the most bytes that a task needs beside what is there when it begins."""
        kind, i, j = action
        cost = self._costs[j]
        # The second gradient of a weight is not added in place: others may have the first.
        adding = max(cost.trained.values(), default=0) * (i == 1)
        if kind == WEIGHT:  # frees while it makes
            return max(0, cost.deferred + adding - self._later[j])
        if kind == BACKWARD:
            peak = cost.split_peak if self._defers else cost.backward_peak
            made = self._trained[j] + self._later[j] - cost.deferred * self._defers
            arriving = sum([size for source, _, size, *_ in self._crossing if source == j])
            return max(peak, made + self._inputs[j] + adding) - total(cost.saved) + arriving
        if kind == FORWARD and i < self._plan.recomputed[j]:
            return self._kept[j] + self._inputs[j] + cost.layer_peak
        return cost.forward_peak

    def changes(self, action: Action) -> Iterator[tuple[int, int]]:
        """Yield by how many bytes a task changes what is live on the device of a partition."""
        kind, i, j = action
        cost, is_recomputed = self._costs[j], i < self._plan.recomputed[j]
        if kind == FORWARD:
            yield j, self._kept[j] if is_recomputed else self._saved[j]
        elif kind == RECOMPUTE:
            yield j, self._again[j]
        elif kind == BACKWARD:
            left = self._kept[j] + self._again[j] if is_recomputed else self._saved[j]
            yield j, self._later[j] - left
        else:
            yield j, -self._later[j]
        # Outputs wait to be copied by the next forward, and gradients by the next backward.
        for source, to, size, unsaved, unkept in self._crossing:
            left = unkept if i < self._plan.recomputed[source] else unsaved
            if kind == FORWARD and j in (source, to):
                yield source, left if j == source else -left
            elif kind == BACKWARD and j in (source, to):
                yield to, size if j == to else -size
        if (kind, j) not in self._begun:  # the first gradients stay, others are added to them
            self._begun.add((kind, j))
            deferred = cost.deferred * self._defers
            yield j, {BACKWARD: self._trained[j] - deferred, WEIGHT: deferred}.get(kind, 0)
