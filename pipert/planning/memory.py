"""Predicts each device's peak of bytes in a step, from what its layers need one by one.

Peak of a device::

    parameters, and the optimizer's state + gradients, once there are some
    + the mini-batch, on the first device
    + micro-batches between their forward and what ends with their backward + the running task

Actions come in the order of the plan. ``F`` leaves what the backward needs, or, if the micro-batch
is recomputed, the inputs of the partition. ``R`` leaves what ``F`` would have left. ``B`` frees it
from the last layer to the first, and meanwhile makes the gradients of weights, which it returns
together; what it puts off it keeps until ``W``.

Not predicted: fragmentation, workspaces of kernels, and what an allocator holds back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipert.planning.layer_costs import LayerCost
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan
from pipert.skip.namespace import Key

__all__: list[str] = []


class PartitionCost(NamedTuple):
    """What a partition costs: seconds and bytes for one micro-batch, and bytes for its weights."""

    forward: float
    backward: float
    split: float
    weight: float
    parameters: int
    trained: int
    largest: int
    put_off: int
    given: int
    kept: int
    """What stays of a recomputed micro-batch, its input included."""
    sent: int
    """Of its output."""
    saved: int
    """Of what stays from the forward to the backward."""
    later: int
    unsaved: int
    """Of its output, if its backward does not need that."""
    stashed: dict[Key, tuple[int, int]]
    """Of each skip that it stashes: all bytes, and those that its backward does not need."""
    popped: frozenset[Key]
    """The skips that it pops."""
    forward_peak: int
    """Of a forward that saves, its input and output included."""
    quiet_peak: int
    """Of a forward that saves nothing."""
    backward_peak: int
    """Of a backward that computes all gradients, what is saved included."""
    split_peak: int
    """Of a backward that puts off what it can."""

    @classmethod
    def of(cls, layers: Sequence[LayerCost]) -> PartitionCost:
        """Add up the costs of consecutive layers."""
        begin, saved, sent, unsaved = _around_each(layers)
        forward_peak = max(
            live + layer.forward_extra for live, layer in zip(begin, layers, strict=True)
        )
        peaks = []
        for puts_off in (False, True):
            done = [0]  # what the layers behind have left
            for layer in reversed(layers[1:]):
                left = layer.trained - layer.put_off * puts_off + layer.later * puts_off
                done.append(done[-1] + left)
            peaks.append(
                max(
                    live + layer.made + behind
                    + (layer.split_extra if puts_off else layer.backward_extra)
                    for live, layer, behind in zip(saved, layers, reversed(done), strict=True)
                )
            )
        return cls(
            **{name: sum([getattr(layer, name) for layer in layers]) for name in _ADDED},
            largest=max(layer.largest for layer in layers),
            given=_given(layers),
            kept=_kept(layers),
            sent=sent,
            unsaved=unsaved,
            saved=saved[-1],
            stashed={key: size for layer in layers for key, size in layer.stashed.items()},
            popped=frozenset([key for layer in layers for key in layer.popped]),
            forward_peak=forward_peak,
            quiet_peak=max(layer.given + layer.quiet_extra for layer in layers),
            backward_peak=peaks[0],
            split_peak=peaks[1],
        )


_ADDED = "forward", "backward", "split", "weight", "parameters", "trained", "put_off", "later"


def _kept(layers: Sequence[LayerCost]) -> int:
    first = next((k for k, layer in enumerate(layers) if layer.given), 0)
    return _given(layers) + sum(layer.kept for k, layer in enumerate(layers) if k != first)


def _given(layers: Sequence[LayerCost]) -> int:
    return next((layer.given for layer in layers if layer.given), 0)  # own code may come first


def _around_each(layers: Sequence[LayerCost]) -> tuple[list[int], list[int], int, int]:
    """Return the bytes at the begin of each layer's forward, and what is saved once it is over.

    What lies between two layers counts once if either needs it. Also return the bytes of the last
    output, and again, if it is not saved.
    """
    begin, found, total = list[int](), list[int](), 0
    own = {key for layer in layers for key in layer.stashed}
    between, is_saved = _given(layers), False
    for layer in layers:
        begin.append(total + between * (not is_saved))
        if layer.saves_input and not is_saved:
            total, is_saved = total + between, True
        # Copies of skips from other partitions; others count where they were stashed.
        total += layer.saved + sum(b for key, b in layer.popped.items() if key not in own)
        if layer.made:  # else it works in place
            between, is_saved = layer.made, False
        if layer.saves_output and not is_saved:
            total, is_saved = total + between, True
        found.append(total)
    return begin, found, between, between * (not is_saved)


def peaks(
    plan: Plan, costs: Sequence[PartitionCost], scale: float, batch: int, targets: int = 0
) -> list[int]:
    """Predict the peak of each worker's device.

    Args:
        plan: the plan of a step.
        costs: of each partition.
        scale: the memory of a trained parameter with its ``.grad`` and the optimizer's state, of
            that of the parameter alone.
        batch: the bytes of the mini-batch, which is on the first device.
        targets: the bytes of the targets, which are on the last one.
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
        most[worker] += round(cost.parameters + (scale - 2) * cost.trained)
    most[plan.placement[0]] += batch
    most[plan.placement[-1]] += targets
    return [most[worker] for worker in sorted(most)]


class _Tasks:
    """What the tasks of a step need, and what they leave."""

    def __init__(self, plan: Plan, costs: Sequence[PartitionCost]) -> None:
        self._plan, self._costs = plan, costs
        self._puts_off = WEIGHT in plan.occurring_kinds
        self._begun = set[tuple[str, int]]()
        homes = {key: j for j, cost in enumerate(costs) for key in cost.stashed}
        self._skips = [
            [
                (homes[key], *costs[homes[key]].stashed[key])
                for key in cost.popped
                if homes[key] != j
            ]
            for j, cost in enumerate(costs)
        ]
        """For each partition, where the skips that it pops come from, all their bytes, and those
        that are not saved there."""
        # A model that is cut may give more to a layer than the output of the one before.
        self._inputs = [
            [(j - 1, max(costs[j - 1].sent, costs[j].given), costs[j - 1].unsaved)] * (j > 0)
            + skips
            for j, skips in enumerate(self._skips)
        ]
        self._given = [
            sum(size for _, size, _ in inputs) if j else costs[0].given
            for j, inputs in enumerate(self._inputs)
        ]
        self._kept = [max(cost.kept, own) for cost, own in zip(costs, self._given, strict=True)]

    def peak(self, action: Action) -> int:
        """Return the most bytes that a task needs beside what is there when it begins."""
        cost = self._costs[action.j]
        skips = sum(size for _, size, _ in self._skips[action.j])  # held by the task
        # The second gradient of a weight is not added in place: others may have the first.
        adding = cost.largest * (action.i == 1)
        if action.kind == WEIGHT:  # frees while it makes
            return max(0, cost.put_off + adding - cost.later)
        if action.kind == BACKWARD:
            peak = cost.split_peak if self._puts_off else cost.backward_peak
            made = cost.trained + (cost.later - cost.put_off) * self._puts_off
            return max(peak, made + self._given[action.j] + adding) - cost.saved + skips
        if action.kind == FORWARD and action.i < self._plan.recomputed[action.j]:
            return max(self._kept[action.j], cost.quiet_peak) + skips
        return cost.forward_peak + skips

    def changes(self, action: Action) -> Iterator[tuple[int, int]]:
        """Yield by how many bytes a task changes what is live on the device of a partition."""
        kind, i, j = action
        cost, is_recomputed = self._costs[j], i < self._plan.recomputed[j]
        if kind == FORWARD:
            yield j, self._kept[j] if is_recomputed else cost.saved
        elif kind == RECOMPUTE:
            yield j, cost.saved - self._kept[j]
        elif kind == BACKWARD:
            yield j, cost.later * self._puts_off - cost.saved
        else:
            yield j, -cost.later
        # Outputs wait to be copied by the next forward, and gradients by the next backward.
        if kind in (FORWARD, BACKWARD):
            for source, size, unsaved in self._between(j):
                left = size if i < self._plan.recomputed[source] else unsaved
                yield (source, -left) if kind == FORWARD else (j, size)
            for to in range(self._plan.n):
                for source, size, unsaved in self._between(to):
                    if source == j:
                        left = size if is_recomputed else unsaved
                        yield (j, left) if kind == FORWARD else (to, -size)
        if (kind, j) not in self._begun:  # the first gradients stay, others are added to them
            self._begun.add((kind, j))
            put_off = cost.put_off * self._puts_off
            yield j, {BACKWARD: cost.trained - put_off, WEIGHT: put_off}.get(kind, 0)

    def _between(self, j: int) -> list[tuple[int, int, int]]:
        """Return from where, on other devices, how many bytes come to a partition."""
        placement = self._plan.placement
        return [each for each in self._inputs[j] if placement[each[0]] != placement[j]]
