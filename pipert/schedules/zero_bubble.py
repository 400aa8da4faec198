"""Fills the bubble with gradients of weights: schedules with a ``W`` (arXiv:2401.10241).

A backward that puts off the gradients of weights lets the partition before go on sooner, and
leaves work for when a worker would wait. The order comes from a simulation: each worker does what
it can do next.

A worker that is free does a backward that is ready, else a forward if it has room for another
micro-batch, else the gradients of weights that backwards have put off, else it waits. Of several it
does that of the lowest micro-batch, and of its later partition. All actions take the same time, 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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

_KINDS = (BACKWARD, FORWARD, WEIGHT)


class _Simulation:
    """The workers at one moment of a step."""

    def __init__(
        self, m: int, placement: Sequence[int], room: Mapping[int, int], copying: float
    ) -> None:
        self.sequences: dict[int, list[Action]] = {worker: [] for worker in placement}
        self._m, n, self._placement, self._room = m, len(placement), placement, room
        self._copying = copying
        self._size = Size(m, n, 0)
        # The later partitions first: of one micro-batch, they are preferred.
        order = range(n - 1, -1, -1)
        self._own = {w: [j for j in order if placement[j] == w] for w in placement}
        self._next = {(kind, j): Action(kind, 0, j) for kind in _KINDS for j in order}
        self._kept = dict.fromkeys(placement, 0)
        self._arrivals: dict[tuple[Action, int], float] = {}  # by action and partition
        self._free_at = dict.fromkeys(placement, 0.0)
        # A heap of when which worker may begin something.
        self._moments = [(0.0, worker) for worker in sorted(set(placement))]

    def run(self) -> None:
        """Let each worker begin what it can, until there is nothing left."""
        while self._moments:
            now, worker = heappop(self._moments)
            if self._free_at[worker] <= now:
                action = self._choose(worker, now)
                if action is not None:
                    self._begin(action, worker, now)

    def _begin(self, action: Action, worker: int, now: float) -> None:
        kind, i, j = action
        if kind == BACKWARD:
            self.sequences[worker].append(Action(RECOMPUTE, i, j))
        self.sequences[worker].append(action)
        self._kept[worker] += (kind == FORWARD) - (kind == WEIGHT)
        self._next[kind, j] = Action(kind, i + 1, j)
        end = self._free_at[worker] = now + 1.0
        for to in (j - 1, j, j + 1):
            if 0 <= to < len(self._placement):
                is_here = self._placement[to] == worker
                arrival = end if is_here else end + self._copying
                self._arrivals[action, to] = arrival
                if to == j or not is_here:
                    heappush(self._moments, (arrival, self._placement[to]))

    def _choose(self, worker: int, now: float) -> Action | None:
        """Return the action that ``worker`` begins, if any is ready."""
        for kind in _KINDS:
            best: Action | None = None
            for later, j in enumerate(self._own[worker]):  # the later ones must follow
                action = self._next[kind, j]
                if action.i == self._m or best is not None and best.i <= action.i:
                    continue
                has_room = kind != FORWARD or self._kept[worker] < self._room[worker] - later
                if has_room and self._is_ready(action, now):
                    best = action
            if best is not None:
                return best
        return None

    def _is_ready(self, action: Action, now: float) -> bool:
        """Whether what ``action`` needs has arrived."""
        for needed in RULES[action.kind].needs(action, self._size):
            if self._arrivals.get((needed, action.j), float("inf")) > now:
                return False
        return True


def zero_bubble_1(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Keep on each device as many micro-batches as ``1f1b`` keeps on the first (*ZB-H1*).

    With *d* devices these are *d* micro-batches of all partitions of a device, each from its ``F``
    to its ``W``.
    """
    return _zero_bubble(m, placement, len(set(placement)))


def zero_bubble_2(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Keep nearly twice as many, so that no device waits for its first gradient (*ZB-H2*).

    With *d* devices, ``2 * d - 1`` micro-batches.
    """
    return _zero_bubble(m, placement, 2 * len(set(placement)) - 1)


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
    return _zero_bubble(m, placement, n // 2, copying=0.25)


def zero_bubble(m: int, n: int, placement: tuple[int, ...]) -> Ticks:
    """Choose ``zb-v`` where the placement is a V, else ``zb-h1``."""
    return (zero_bubble_v if _is_v(placement) else zero_bubble_1)(m, n, placement)


def _is_v(placement: tuple[int, ...]) -> bool:
    half = range(len(placement) // 2)
    return placement == (*half, *reversed(half))


def _zero_bubble(
    m: int, placement: tuple[int, ...], most: int, copying: float = 0.0
) -> Ticks:
    """Order the actions of a step, with ``W``.

    Args:
        m: the number of micro-batches.
        placement: the worker of each partition.
        most: how many micro-batches a worker keeps from ``F`` to ``W``, in each of its partitions.
            Of the sum one is left free for each later partition of the worker.
        copying: the time in which a result gets to a partition on another worker.
    """
    room = {worker: most * count for worker, count in Counter(placement).items()}
    simulation = _Simulation(m, placement, room, copying)
    simulation.run()
    workers, n = sorted(simulation.sequences), len(placement)
    sequences = [simulation.sequences[worker] for worker in workers]
    return lay_out(sequences, workers, [Size(m, n, m)] * n)
