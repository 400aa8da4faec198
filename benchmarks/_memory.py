"""Computes the peak of the bytes in use on each device while a simulated pipeline runs.

Counted: parameters with their gradients and the optimizer's state; the mini-batch on the first
device; a partition's inputs, until its backward; its outputs, until they are copied,
and gradients likewise; what the layers save, from the forward (or the recomputation) to the
backward; the output with its gradient; and, while a task runs, the largest temporary
inputs and outputs of a layer of its partition.

Not counted: overhead of allocators and kernels, and fragmentation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from _layer_costs import Bytes, ranges
from _simulator import Simulation, Task

__all__ = ["peaks"]


class _Use(NamedTuple):
    device: int
    begin: float
    end: float
    bytes: float


def peaks(
    simulation: Simulation, sizes: Bytes, balance: Sequence[int], samples: float, scale: float
) -> list[float]:
    """Returns the highest number of bytes on each device.

    Args:
        simulation: a simulated pipeline whose partitions are each on a device of their own.
        samples: the samples in each micro-batch.
        scale: bytes of a parameter with its gradient and optimizer state, per byte of the
            parameter alone.
    """
    layers = ranges(balance)
    highest = []
    changes: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for use in _uses(simulation, sizes, layers, samples):
        changes[use.device] += [(use.begin, use.bytes), (use.end, -use.bytes)]
    for j, partition in enumerate(layers):
        now = scale * sum(sizes.parameters[k] for k in partition)
        most = now
        for _, change in sorted(changes[j]):  # at equal times, uses end before others begin
            now += change
            most = max(most, now)
        highest.append(most)
    return highest


def _uses(
    simulation: Simulation, sizes: Bytes, layers: Sequence[range], samples: float
) -> Iterator[_Use]:
    plan, end = simulation.plan, simulation.seconds
    done = {(task.kind, task.i, task.j): task for task in simulation.tasks if task.kind != "copy"}
    last = plan.n - 1
    yield _Use(0, 0.0, end, samples * plan.m * sizes.inputs[0])
    for task in simulation.tasks:
        if task.kind == "copy":
            yield from _copied(task, done)
            continue
        partition = layers[task.j]
        most = max(sizes.inputs[k] + sizes.outputs[k] for k in partition)
        yield _Use(task.j, task.start, task.end, samples * most)
        if task.kind == "recompute" or (task.kind == "forward" and task.i >= plan.checkpointed):
            back = done["backward", task.i, task.j]
            yield _Use(task.j, task.start, back.end, samples * sizes.saved_by(partition))
        if task.kind == "forward" and task.j == last:
            back = done["backward", task.i, task.j]
            yield _Use(last, task.end, back.end, 2 * samples * sizes.outputs[-1])


def _copied(task: Task, done: dict[tuple[str, int, int], Task]) -> Iterator[_Use]:
    """Yields a copy's uses: at the source until it is copied, at the target until its backward."""
    assert task.source is not None
    maker = done["forward" if task.source < task.j else "backward", task.i, task.source]
    yield _Use(task.source, maker.end, task.end, task.bytes)
    yield _Use(task.j, task.start, done["backward", task.i, task.j].end, task.bytes)
