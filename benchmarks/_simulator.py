"""Simulates the duration of pipert's schedule from those of its tasks, without computing layers.

``pipert.schedules.simulate`` knows workers with an order of their own, and copies that are free.
Here copies take turns at the links, whichever is ready first, so tasks wait for two things at once.

A :class:`Plan` says how long each ``F[i,j]``, ``R[i,j]`` and ``B[i,j]`` takes, which bytes go from
where to where, and on what kind of machine. These are pipert's rules:

1. A worker runs its forward tasks in the order of the clock-cycle, and starts each
   when its input has arrived.
2. The backward begins after the last forward task, and each device runs it in reverse
   order, the last micro-batch first. This holds without fork and join, too: autograd picks the
   ready node created last, and a worker creates its partition's nodes micro-batch
   by micro-batch. Fork and join only guarantee this order, and cost no time here.
3. Each device is a queue of its own, for the backward as well. The host is never late. ``R[i,j]``
   starts when the next device has computed ``dy``, while it is copied, and ``B[i,j]`` when it has
   arrived. Not earlier: autograd makes a node's stream wait for the previous node's stream.
4. A copy between devices takes ``latency + bytes / bandwidth``, and needs the outgoing engine of
   one device and the incoming one of the other, first ready, first served. Without copy
   streams it stops both devices' computation instead, and is issued before the tasks of its
   diagonal.
5. A skip is copied straight to where it is popped, or else from device to device.

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
    """Bytes of each micro-batch that go from one partition to a later one; a skip or its input."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What is simulated.

    Args:
        m, n: micro-batches and partitions.
        forward, recompute, backward: seconds of each task.
        checkpointed: how many micro-batches, from the first, are recomputed.
        transfers: between partitions; gradients go back the same way.
        bandwidth: bytes in a second, between two devices and in each direction.
        latency: seconds of a copy besides.
        copy_streams, direct_skips: whether copies run beside computation, and skips go straight.
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
        """The copies of one micro-batch, those of the same way put together, in order."""
        ways: defaultdict[tuple[int, int], int] = defaultdict(int)
        for source, target, size in ((t.source, t.target, t.bytes) for t in self.transfers):
            stops = [source, target] if self.direct_skips else [*range(source, target + 1)]
            for way in zip(stops, stops[1:]):
                ways[way] += size
        return [Transfer(*way, size) for way, size in sorted(ways.items())]


@dataclass(eq=False)
class Task:
    """A task or copy; the simulator sets ``start`` and ``end``.

    ``j`` of a copy is its destination partition, and ``source`` the one it comes from.
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
    """A plan and when each of its tasks ran, in the order in which they were issued."""

    plan: Plan
    tasks: list[Task]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(task.end for task in self.tasks)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they did not compute."""
        busy = sum(task.seconds for task in self.tasks if task.kind != "copy")
        return 1 - busy / (self.plan.n * self.seconds)


def checkpointed(mode: str, m: int) -> int:
    """How many of ``m`` micro-batches a checkpoint mode recomputes."""
    return {"always": m, "except_last": m - 1, "never": 0}[mode]


def simulate(plan: Plan) -> Simulation:
    """Run the plan."""
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
        """Copies of what ``F[i,j]`` or ``B[i,j]`` waits for."""
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
        """Put a task behind those of its streams."""
        before = [self.streams[stream] for stream in streams if stream in self.streams]
        task.after = (*task.after, *before)
        self.streams.update(dict.fromkeys(streams, task))
        self.tasks.append(task)
        return task


def _run(tasks: Sequence[Task]) -> None:
    """Find start and end of each task: after those it waits for, and when its engines are free."""
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
