"""Orders actions by a simulation: each worker does what it can do next.

A worker that is free does a backward that is ready, else a forward if it has room for another
micro-batch, else the gradients of weights that backwards have put off, else it waits. Of several it
does that of the lowest micro-batch, and of its later partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from pipert.schedules.action import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    RULES,
    WEIGHT,
    Action,
    Size,
    Ticks,
    lay_out,
)

__all__: list[str] = []

Seconds = Callable[[Action], float]
Copying = Callable[[int, int], float]
"""The time in which the result of a partition gets to another one, on another worker."""


def greedy(
    m: int, placement: Sequence[int], room: Mapping[int, int], seconds: Seconds, copying: Copying
) -> Ticks:
    """Order all actions of a step of ``m`` micro-batches, with ``W``.

    Args:
        m: the number of micro-batches.
        placement: the worker of each partition.
        room: how many micro-batches each worker may keep from ``F`` to ``W``, counted once for each
            of its partitions. Of these one is left free for each later partition of the worker, so
            the least is the number of its partitions.
        seconds: the time of each action, that of ``R`` in its ``B``.
        copying: the time of copies.
    """
    simulation = _Simulation(m, placement, room, seconds, copying)
    while simulation.advance():
        pass
    workers = sorted(simulation.sequences)
    sequences = [simulation.sequences[worker] for worker in workers]
    n = len(placement)
    return lay_out(sequences, workers, [Size(m, n, m)] * n)


class _Simulation:
    """The workers at one moment of a step."""

    def __init__(
        self,
        m: int,
        placement: Sequence[int],
        room: Mapping[int, int],
        seconds: Seconds,
        copying: Copying,
    ) -> None:
        self.sequences: dict[int, list[Action]] = {worker: [] for worker in placement}
        self._m, self._n, self._placement, self._room = m, len(placement), placement, room
        self._seconds, self._copying = seconds, copying
        self._own = {w: [j for j in range(self._n) if placement[j] == w] for w in placement}
        kinds = (FORWARD, BACKWARD, WEIGHT)
        self._begun = {(kind, j): 0 for kind in kinds for j in range(self._n)}
        self._ends: dict[Action, float] = {}
        self._free_at = dict.fromkeys(placement, 0.0)
        self._times = [0.0]  # a heap of the moments at which a worker may begin something
        self._now = 0.0

    def advance(self) -> bool:
        """Go on to the next moment, and let workers begin actions; return whether there is one."""
        if not self._times:
            return False
        self._now = heappop(self._times)
        for worker, sequence in self.sequences.items():
            action = self._choose(worker) if self._free_at[worker] <= self._now else None
            if action is not None:
                if action.kind == BACKWARD:
                    sequence.append(Action(RECOMPUTE, action.i, action.j))
                sequence.append(action)
                self._begin(action)
        return True

    def _begin(self, action: Action) -> None:
        worker = self._placement[action.j]
        end = self._now + self._seconds(action)
        self._free_at[worker] = self._ends[action] = end
        self._begun[action.kind, action.j] += 1
        heappush(self._times, end)
        for j in (action.j - 1, action.j + 1):
            if 0 <= j < self._n and self._placement[j] != worker:
                heappush(self._times, end + self._copying(action.j, j))

    def _choose(self, worker: int) -> Action | None:
        """Return the action that ``worker`` begins, if any is ready."""
        own = self._own[worker]
        kept = sum(self._begun[FORWARD, j] - self._begun[WEIGHT, j] for j in own)
        for kind in BACKWARD, FORWARD, WEIGHT:
            ready = []
            for j in own:
                action = Action(kind, self._begun[kind, j], j)
                room = self._room[worker] - sum(k > j for k in own)  # the later ones must follow
                if action.i < self._m and (kind != FORWARD or kept < room) and self._can(action):
                    ready.append(action)
            if ready:
                return min(ready, key=lambda action: (action.i, -action.j))
        return None

    def _can(self, action: Action) -> bool:
        """Whether what ``action`` needs has arrived."""
        needs = RULES[action.kind].needs(action, Size(self._m, self._n, 0))
        return all(self._arrival(needed, action.j) <= self._now for needed in needs)

    def _arrival(self, action: Action, j: int) -> float:
        """Return when the result of ``action`` is on the worker of partition ``j``."""
        end = self._ends.get(action, float("inf"))
        is_here = self._placement[action.j] == self._placement[j]
        return end if is_here else end + self._copying(action.j, j)
