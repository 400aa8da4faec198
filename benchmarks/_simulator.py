"""Simulates how long pipert's schedule takes, from the durations of its tasks.

In ``pipert.schedules.simulate`` copies are free and each worker has a fixed order. Here copies also
compete for the links, first ready, first served, so a task can wait for a worker and for a link.

A :class:`Plan` gives the durations of ``F[i,j]``, ``R[i,j]`` and ``B[i,j]``, the bytes that go from
partition to partition, and the rates of the machine. These are pipert's rules:

1. A worker runs its forward tasks in the order of the clock-cycle, and starts each when its input
   has arrived.
2. The backward begins after the last forward task, and each device runs it in reverse order, the
   last micro-batch first. This holds without fork and join, too: autograd picks the ready node
   created last, and a worker creates its partition's nodes micro-batch by micro-batch. Fork and
   join only guarantee this order, and cost no time here.
3. Each device is a queue of its own, for the backward as well. The host is never late. ``R[i,j]``
   starts when the next device has computed ``dy``, while ``dy`` is copied; ``B[i,j]`` starts when
   ``dy`` has arrived. ``R[i,j]`` does not start earlier, because autograd makes a node's stream
   wait for the previous node's stream.
4. A copy between devices takes ``latency + bytes / bandwidth``. It needs the outgoing engine of one
   device and the incoming engine of the other, first ready, first served. Without copy streams it
   stops both devices' computation instead, and is issued before the tasks of its diagonal.
5. A skip is copied straight to the partition that pops it, or else from device to device.

``simulator.py`` checks all of them against whole steps, except the last sentence of rule 4.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pipert.schedules.plan import plan_call

__all__ = ["Plan", "Simulation", "Task", "Transfer", "checkpointed", "simulate"]

Seconds = Callable[[int, int], float]  # of the task of micro-batch i on partition j


@dataclass(frozen=True)
class Transfer:
    """The bytes of a skip or an input, for each micro-batch, between two partitions."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """The description of a pipeline to simulate.

    Args:
        m, n: the numbers of micro-batches and partitions.
        forward, recompute, backward: seconds of each task.
        checkpointed: the number of micro-batches, from the first, that are recomputed.
        transfers: transfers between partitions; gradients go back the same way.
        bandwidth: bytes per second between two devices, in each direction.
        latency: extra seconds of each copy.
        copy_streams: whether copies run beside computation.
        direct_skips: whether skips go straight to the partition that pops them.
    """

    m: int
    n: int
    forward: Seconds
    recompute: Seconds
    backward: Seconds
    checkpointed: int = 0
    transfers: Sequence[Transfer] = ()
    bandwidth: float = float("inf")
    latency: float = 0.0
    copy_streams: bool = True
    direct_skips: bool = True

    def hops(self) -> list[Transfer]:
        """Returns the copies of one micro-batch, in order, with those on the same link merged."""
        links: defaultdict[tuple[int, int], int] = defaultdict(int)
        for source, target, size in ((t.source, t.target, t.bytes) for t in self.transfers):
            stops = [source, target] if self.direct_skips else [*range(source, target + 1)]
            for link in zip(stops, stops[1:]):
                links[link] += size
        return [Transfer(*link, size) for link, size in sorted(links.items())]


@dataclass(eq=False)
class Task:
    """A task or copy; the simulator sets ``start`` and ``end``.

    ``j`` of a copy is its destination partition, and ``source`` its source partition.
    """

    kind: str
    i: int
    j: int
    seconds: float
    after: tuple[Task, ...]
    engines: tuple[tuple[str, int], ...] = ()
    source: int | None = None
    bytes: int = 0
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """A plan and its tasks with their times, in the order in which they were issued."""

    plan: Plan
    tasks: list[Task]

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end."""
        return max(task.end for task in self.tasks)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they did not compute."""
        busy = sum(task.seconds for task in self.tasks if task.kind != "copy")
        return 1 - busy / (self.plan.n * self.seconds)


def checkpointed(mode: str, m: int) -> int:
    """Returns how many of ``m`` micro-batches a checkpoint mode recomputes."""
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def simulate(plan: Plan) -> Simulation:
    """Simulates the plan."""
    tasks = _Program(plan).tasks
    _run(tasks)
    return Simulation(plan, tasks)


@dataclass
class _Program:
    """The tasks of a plan, in the order in which they are issued."""

    plan: Plan
    tasks: list[Task] = field(default_factory=list)
    streams: dict[object, Task] = field(default_factory=dict)  # the last task of each

    def __post_init__(self) -> None:
        hops = self.plan.hops()
        order = plan_call(self.plan.m, self.plan.n, range(self.plan.n)).order
        diagonals = [
            [(i, j) for _, i, j in clock] for _, clock in groupby(order, lambda a: a.i + a.j)
        ]
        done: dict[tuple[str, int, int], Task] = {}
        for diagonal in diagonals:
            arrived = {j: self._copies(hops, i, j, "forward", done) for i, j in diagonal}
            for i, j in diagonal:
                done["forward", i, j] = self._compute("forward", i, j, arrived[j])
        loss = self.tasks[-1]
        for diagonal in reversed(diagonals):
            arrived = {j: self._copies(hops, i, j, "backward", done) for i, j in diagonal}
            for i, j in reversed(diagonal):
                done["backward", i, j] = self._backward(i, j, arrived[j] or (loss,))

    def _backward(self, i: int, j: int, arrived: tuple[Task, ...]) -> Task:
        if i < self.plan.checkpointed:
            makers = [task.after[0] if task.kind == "copy" else task for task in arrived]
            self._compute("recompute", i, j, tuple(makers))
        return self._compute("backward", i, j, arrived)

    def _compute(self, kind: str, i: int, j: int, after: tuple[Task, ...]) -> Task:
        durations = {
            "forward": self.plan.forward,
            "recompute": self.plan.recompute,
            "backward": self.plan.backward,
        }
        return self._issue(Task(kind, i, j, durations[kind](i, j), after), [j])

    def _copies(
        self, hops: list[Transfer], i: int, j: int, way: str, done: dict[tuple[str, int, int], Task]
    ) -> tuple[Task, ...]:
        """Issues the copies that ``F[i,j]`` or ``B[i,j]`` waits for."""
        forward = way == "forward"
        arrived = []
        for hop in hops:
            source, target = (hop.source, hop.target) if forward else (hop.target, hop.source)
            if target == j:
                arrived.append(self._copy(hop.bytes, done[way, i, source], target))
        return tuple(arrived)

    def _copy(self, size: int, maker: Task, j: int) -> Task:
        seconds = self.plan.latency + size / self.plan.bandwidth
        task = Task("copy", maker.i, j, seconds, (maker,), source=maker.j, bytes=size)
        if self.plan.copy_streams:
            task.engines = (("out", maker.j), ("in", j))
            return self._issue(task, [])
        return self._issue(task, [maker.j, j])

    def _issue(self, task: Task, streams: Sequence[object]) -> Task:
        """Appends a task, after the last tasks of its streams."""
        before = [self.streams[stream] for stream in streams if stream in self.streams]
        task.after = (*task.after, *before)
        self.streams.update(dict.fromkeys(streams, task))
        self.tasks.append(task)
        return task


def _run(tasks: Sequence[Task]) -> None:
    """Sets the times of each task: after the tasks it waits for, when its engines are free."""
    followers: defaultdict[Task, list[int]] = defaultdict(list)
    missing = [len(task.after) for task in tasks]
    for number, task in enumerate(tasks):
        for other in task.after:
            followers[other].append(number)
    free: defaultdict[tuple[str, int], float] = defaultdict(float)
    ready = [(0.0, number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        task = tasks[heapq.heappop(ready)[1]]
        task.start = max([task.start, *[free[engine] for engine in task.engines]])
        task.end = task.start + task.seconds
        free.update(dict.fromkeys(task.engines, task.end))
        for number in followers[task]:
            tasks[number].start = max(tasks[number].start, task.end)
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready, (tasks[number].start, number))
