"""Fills the bubble with gradients of weights: schedules with a ``W`` (arXiv:2401.10241).

A backward that puts off the gradients of weights lets the partition before go on sooner, and
leaves work for when a worker would wait. The order comes from a simulation (:func:`.greedy`).
"""

from __future__ import annotations

from collections import Counter

from pipert.schedules.action import Ticks
from pipert.schedules.greedy import greedy


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
    """Order the actions, with ``most`` micro-batches on a device, from their ``F`` to ``W``."""
    room = {worker: most * count for worker, count in Counter(placement).items()}
    return greedy(m, placement, room, copying)
