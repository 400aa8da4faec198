"""Predicts each device's peak of bytes in a step, from what its layers need one by one.

Peak of a device::

    parameters, with .grad and the optimizer's state + the mini-batch, on the first device
    + micro-batches between their forward and what ends with their backward + the running task

Actions come in the order of the plan. ``F`` leaves what the backward needs, or, if the micro-batch
is recomputed, the inputs of the partition. ``R`` leaves what ``F`` would have left. ``B`` frees it
from the last layer to the first, and meanwhile makes the gradients of weights, which it returns
together; what it puts off it keeps until ``W``.

Not predicted: fragmentation, workspaces of kernels, and what an allocator holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipert.planning.layer_costs import LayerCost
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from pipert.schedules.plan import Plan
from pipert.skip.namespace import Key

__all__: list[str] = []


class PartitionCost(NamedTuple):
    """What a partition costs: seconds and bytes for one micro-batch, and bytes for its weights."""

    forward: float
    backward: float
    weight: float
    parameters: int
    trained: int
    put_off: int
    given: int
    sent: int
    """Of its output."""
    saved: int
    """Of what stays from the forward to the backward."""
    later: int
    stashed: dict[Key, int]
    """Of each skip that it stashes."""
    popped: frozenset[Key]
    """The skips that it pops."""
    forward_peak: int
    """Of a forward that saves, its input and output included."""
    backward_peak: int
    """Of a backward that computes all gradients, what is saved included."""
    split_peak: int
    """Of a backward that puts off what it can."""

    @classmethod
    def of(cls, layers: Sequence[LayerCost]) -> PartitionCost:
        """Add up the costs of consecutive layers."""
        saved = _saved_after_each(layers)
        forward_peak = max(
            before + layer.given + layer.made + layer.saved
            for before, layer in zip([0, *saved], layers, strict=False)
        )
        peaks = []
        for puts_off in (False, True):
            done = [0]  # what the layers behind have left
            for layer in reversed(layers[1:]):
                left = layer.trained - layer.put_off * puts_off + layer.later * puts_off
                done.append(done[-1] + left)
            # The gradients of a layer's output and input are there at once.
            peaks.append(
                max(
                    before + layer.made + layer.given + behind
                    + layer.trained + (layer.arriving - layer.put_off) * puts_off
                    for before, layer, behind in zip(saved, layers, reversed(done), strict=True)
                )
            )
        return cls(
            forward=sum(layer.forward for layer in layers),
            backward=sum(layer.backward for layer in layers),
            weight=sum(layer.weight for layer in layers),
            parameters=sum(layer.parameters for layer in layers),
            trained=sum(layer.trained for layer in layers),
            put_off=sum(layer.put_off for layer in layers),
            given=layers[0].given,
            sent=layers[-1].made,
            saved=saved[-1],
            later=sum(layer.later for layer in layers),
            stashed={key: size for layer in layers for key, size in layer.stashed.items()},
            popped=frozenset([key for layer in layers for key in layer.popped]),
            forward_peak=forward_peak,
            backward_peak=peaks[0],
            split_peak=peaks[1],
        )


def _saved_after_each(layers: Sequence[LayerCost]) -> list[int]:
    """Return the bytes saved by the first layer, by the first two, and so on.

    What lies between two layers counts once if either needs it.
    """
    found, total = list[int](), 0
    between, is_saved = layers[0].given, False
    for layer in layers:
        if layer.saves_input and not is_saved:
            total, is_saved = total + between, True
        total += layer.saved
        if layer.made:  # else it works in place
            between, is_saved = layer.made, False
        if layer.saves_output and not is_saved:
            total, is_saved = total + between, True
        found.append(total)
    return found


def _incoming(costs: Sequence[PartitionCost]) -> list[list[tuple[int, int]]]:
    """Return, for each partition, from where how many bytes come: its input, and skips."""
    homes = {key: j for j, cost in enumerate(costs) for key in cost.stashed}
    found = []
    for j, cost in enumerate(costs):
        own = [(j - 1, costs[j - 1].sent)] if j else []
        for key in sorted(cost.popped, key=str):
            if homes[key] != j:
                own.append((homes[key], costs[homes[key]].stashed[key]))
        found.append(own)
    return found


def _add(now: dict[int, int], worker: int, size: int) -> None:
    now[worker] += size


def peaks(
    plan: Plan, costs: Sequence[PartitionCost], scale: float, batch: int
) -> list[int]:
    """Predict the peak of each worker's device.

    Args:
        plan: the plan of a step.
        costs: of each partition.
        scale: the memory of a trained parameter with its ``.grad`` and the optimizer's state, of
            that of the parameter alone.
        batch: the bytes of the mini-batch.
    """
    puts_off = WEIGHT in plan.occurring_kinds
    incoming = _incoming(costs)
    outgoing = [
        [(to, size) for to in range(plan.n) for source, size in incoming[to] if source == j]
        for j in range(plan.n)
    ]
    given = [sum(size for _, size in each) or cost.given for each, cost in zip(incoming, costs, strict=True)]
    now, most = dict.fromkeys(plan.placement, 0), dict.fromkeys(plan.placement, 0)
    for action in plan.order:
        kind, i, j = action
        worker, cost = plan.placement[j], costs[j]
        is_recomputed = i < plan.recomputed[j]
        if kind == FORWARD:
            peak = cost.forward_peak
            after = given[j] if is_recomputed else cost.saved
            for source, size in incoming[j]:  # is copied, and not kept there any more
                _add(now, plan.placement[source], -size * (plan.placement[source] != worker))
            after += sum(size for to, size in outgoing[j] if plan.placement[to] != worker)
        elif kind == RECOMPUTE:
            peak, after = cost.forward_peak, cost.saved - given[j]
        elif kind == BACKWARD:
            peak = (cost.split_peak if puts_off else cost.backward_peak) - cost.saved
            after = cost.later * puts_off - cost.saved
            for to, size in outgoing[j]:
                _add(now, plan.placement[to], -size * (plan.placement[to] != worker))
            after += sum(
                size for source, size in incoming[j] if plan.placement[source] != worker
            )
        else:
            peak, after = cost.put_off, -cost.later
        most[worker] = max(most[worker], now[worker] + peak)
        now[worker] += after
    found = []
    for worker in sorted(most):
        own = [cost for cost, at in zip(costs, plan.placement, strict=True) if at == worker]
        fixed = sum(cost.parameters + (scale - 1) * cost.trained for cost in own)
        found.append(round(fixed) + most[worker] + batch * (plan.placement[0] == worker))
    return found
