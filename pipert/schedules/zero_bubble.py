"""Fills the bubble with gradients of weights: schedules with a ``W`` (arXiv:2401.10241).

A backward that puts off the gradients of weights lets the partition before go on sooner, and
leaves work for when a worker would wait. The order comes from a simulation, in which each worker
does what it can do next: a backward, else a forward, else what backwards have put off.
"""

from __future__ import annotations

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

_ACTION = 4
"""The simulated time of an action."""


def zero_bubble_1(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Keep on each device as many micro-batches as ``1f1b`` keeps on the first (*ZB-H1*).

    With *d* devices these are *d* micro-batches of all partitions of a device, each from its ``F``
    to its ``W``.
    """
    return _zero_bubble(m, n, placement, len(set(placement)))


def zero_bubble_2(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Keep nearly twice as many, so that no device waits for its first gradient (*ZB-H2*).

    With *d* devices, ``2 * d - 1`` micro-batches.
    """
    return _zero_bubble(m, n, placement, 2 * len(set(placement)) - 1)


def zero_bubble_v(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Keep what ``zb-h1`` keeps, with two partitions on each device, placed as a V (*ZB-V*).

    The last partition is on the first device, as in ``devices=[0, 1, 2, 2, 1, 0]``. Each is half as
    long, so the pipeline fills in half the time.

    Raises:
        ValueError: the placement is no V.
    """
    if not _is_v(placement):
        raise ValueError(
            "'zb-v' is for twice as many partitions as devices, placed as a V, as in devices="
            f"['cuda:0', 'cuda:1', 'cuda:1', 'cuda:0']; the workers of the partitions are "
            f"{list(placement)}"
        )
    # A device has other work while a copy is under way, if that is taken into account.
    return _zero_bubble(m, n, placement, n // 2, copy=1)


def zero_bubble(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Choose ``zb-v`` where the placement is a V, else ``zb-h1``."""
    return (zero_bubble_v if _is_v(placement) else zero_bubble_1)(m, n, placement)


def _is_v(placement: tuple[int, ...]) -> bool:
    half = range(len(placement) // 2)
    return placement == (*half, *reversed(half))


def _zero_bubble(
    m: int, n: int, placement: tuple[int, ...], most: int, copy: int = 0
) -> Ticks:
    """Order the actions, with ``most`` micro-batches on a device, from their ``F`` to ``W``."""
    simulation = _Simulation(m, n, placement, most, copy)
    while simulation.advance():
        pass
    return lay_out(simulation.sequences, simulation.workers, Size(m, n, m))


class _Simulation:
    """The workers at one moment of a step."""

    def __init__(self, m: int, n: int, placement: tuple[int, ...], most: int, copy: int) -> None:
        self.workers = sorted(set(placement))
        self.sequences: list[list[Action]] = [[] for _ in self.workers]
        self.done = {(kind, j): 0 for kind in (FORWARD, BACKWARD, WEIGHT) for j in range(n)}
        """The number of actions of each kind that each partition has begun."""
        self._m, self._n, self._placement, self._most = m, n, placement, most
        self._copy = copy
        self._ends: dict[Action, int] = {}
        self._free_at = dict.fromkeys(self.workers, 0)
        self._now = 0

    def advance(self) -> bool:
        """Let each worker that is free begin what it can; go on. Return whether more is to do."""
        for worker, sequence in zip(self.workers, self.sequences, strict=True):
            action = self._choose(worker) if self._free_at[worker] <= self._now else None
            if action is None:
                continue
            self._free_at[worker] = self._ends[action] = self._now + _ACTION
            self.done[action.kind, action.j] += 1
            if action.kind == BACKWARD:
                sequence.append(Action(RECOMPUTE, action.i, action.j))
            sequence.append(action)
        self._now += 1
        return any(self.done[WEIGHT, j] < self._m for j in range(self._n))

    def _choose(self, worker: int) -> Action | None:
        """Return the action of the lowest micro-batch that is ready, if any."""
        own = [j for j in range(self._n) if self._placement[j] == worker]
        kept = sum(self.done[FORWARD, j] - self.done[WEIGHT, j] for j in own)
        for kind in BACKWARD, FORWARD, WEIGHT:
            ready = []
            for j in own:
                action = Action(kind, self.done[kind, j], j)
                room = self._most * len(own) - sum(k > j for k in own)  # the later ones must follow
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
        is_here = self._placement[action.j] == self._placement[j]
        return self._ends.get(action, float("inf")) + (0 if is_here else self._copy)
