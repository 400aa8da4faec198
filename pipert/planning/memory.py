"""Predicts each device's peak of bytes in a step by counting what its partitions keep.

Peak of a device::

    parameters, their gradients, and the optimizer's state
    + the mini-batch, on the first device; the targets, on the last one
    + micro-batches that are kept x what each needs: the tensors that are saved, or, if the
      partition is recomputed, its inputs
    + values and gradients on their way to another device
    + the largest task; or the temporary tensors of the optimizer's step, if they are more

``F`` leaves what the backward needs. ``R`` makes it again. ``B`` frees it from the last block to
the first, and meanwhile makes gradients of weights; what it defers stays until ``W``. A block, on
its way back, needs the gradients of its outputs and inputs; of any one nothing may be freed yet.

Not predicted: fragmentation, workspaces of kernels, and what an allocator holds back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipert.balance.measure import Cost, Sizes, joined, total, without
from pipert.planning.optimizer import OptimizerMemory
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from pipert.schedules.plan import Plan

Blocks = Sequence[Cost]


class DeviceMemory(NamedTuple):
    """The bytes on one device at the peak of a step."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    """The state of the optimizer."""
    activations: int
    """What tasks keep and need, the mini-batch and its targets; or what the optimizer's step needs
    when these are gone, if that is more."""


def peaks(
    plan: Plan, parts: Sequence[Blocks], optimizer: OptimizerMemory, batch: int, targets: int = 0
) -> list[DeviceMemory]:
    """Predict the peak of each worker's device from the costs of the blocks of each partition.

    A partition recomputes all micro-batches, or none.
    """
    place, costs = plan.placement, [joined(blocks) for blocks in parts]
    is_split, crossing = WEIGHT in plan.occurring_kinds, [*_crossing(costs)]
    left, tasks = list[Sizes](), list[dict[str, tuple[int, int]]]()
    """What a forward leaves; by kind of task the most bytes that it needs, and what it leaves."""
    for j, (blocks, cost) in enumerate(zip(parts, costs, strict=True)):
        left.append({**cost.inputs, **cost.kept} if plan.recomputed[j] else cost.saved)
        stays = total(without(left[j], costs[0].inputs if place[j] == place[0] else {}))
        again = total(without(cost.saved, cost.kept)) if plan.recomputed[j] else 0
        # The second gradient of a weight is not added in place: others may have the first.
        made = total(cost.trained) + max(cost.trained.values(), default=0)
        later = cost.deferred * is_split
        ending = (later if is_split else made) + total(cost.inputs) - total(cost.saved)
        arriving = sum([
            total(sizes) for source, to, sizes in crossing if source == j and place[to] != place[j]
        ])
        backward = max(_backward(blocks, is_split), ending) + arriving
        tasks.append({
            FORWARD: (stays, stays), RECOMPUTE: (again, again),
            BACKWARD: (backward, later - stays - again), WEIGHT: (made - later, -later),
        })  # fmt: skip
    waiting: list[list[tuple[int, int, int, int]]] = [[] for _ in costs]
    for source, to, sizes in crossing:
        for j in (source, to):
            waiting[j].append((source, to, total(without(sizes, left[source])), total(sizes)))
    live, most = Counter[int](), Counter[int]()
    for kind, _, j in plan.order:
        task, change = tasks[j][kind]
        most[place[j]] = max(most[place[j]], live[place[j]] + task)
        live[place[j]] += change
        for source, to, output, gradient in waiting[j]:
            if kind == FORWARD:  # outputs wait for the next forward
                live[place[source]] += output if j == source else -output
            elif kind == BACKWARD:  # and gradients for the next backward
                live[place[to]] += gradient if j == to else -gradient
    most[place[0]] += batch
    most[place[-1]] += targets
    found = []
    for worker in sorted(most):  # what several partitions share is there once
        own = [cost for cost, at in zip(costs, place, strict=True) if at == worker]
        weights = total({key: size for cost in own for key, size in cost.parameters.items()})
        each = {key: size for cost in own for key, size in cost.trained.items()}
        trained, largest = total(each), max(each.values(), default=0)
        step = optimizer.step * trained + optimizer.of_largest * largest
        state, working = round(optimizer.state * trained), max(most[worker], round(step))
        found.append(DeviceMemory(weights, trained, state, working))
    return found


def _crossing(costs: Sequence[Cost]) -> Iterator[tuple[int, int, Sizes]]:
    """Yield from which partition to which one values go."""
    for j, cost in enumerate(costs):
        needed: Sizes = cost.inputs
        for source in reversed(range(j)):
            outputs = costs[source].outputs
            if found := {key: size for key, size in needed.items() if key in outputs}:
                yield source, j, found
            needed = without(needed, outputs)


def _backward(blocks: Blocks, is_split: bool) -> int:
    """Return the most bytes that a backward needs beyond what is saved."""
    makes = [block.deferred if is_split else total(block.trained) for block in blocks]
    saved = joined(blocks).saved
    made, freed, most, seen = sum(makes), total(saved), 0, set[int]()
    for block, own in zip(blocks, makes, strict=True):  # as it is when the backward gets there
        made -= own
        freed -= total(without(block.saved, seen))
        seen |= block.saved.keys()
        # Of what is deferred about half is among the saved ones.
        need = total(block.inputs) + total(block.outputs) + (own // 2 if is_split else own)
        most = max(most, need, made + need - freed)
    return most
