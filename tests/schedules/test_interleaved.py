"""Tests the plan of interleaved 1F1B: its bubble, its memory, and any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from pipert.schedules import Plan, plan


def in_turns(m: int, d: int, v: int, recomputed: int = 0) -> Plan:
    """Plans a step for ``d`` workers with ``v`` partitions each."""
    return plan("interleaved", m, d * v, [j % d for j in range(d * v)], recomputed)


def bubble(found: Plan) -> float:
    """Returns the percentage of idle ticks of all workers."""
    workers = len(set(found.placement))
    return round(100 * (1 - len(found) / (workers * len(found.ticks))), 1)


def peaks(found: Plan) -> list[int]:
    """Returns the largest number of micro-batches of one partition that each worker keeps."""
    kept = dict.fromkeys(found.placement, 0)
    most = dict(kept)
    for kind, _, j in found:
        worker = found.placement[j]
        kept[worker] += {"F": 1, "R": 0, "B": -1}[kind]
        most[worker] = max(most[worker], kept[worker])
    return list(most.values())


class Published(NamedTuple):
    """The published figures for 8, 16 and 32 micro-batches."""

    d: int
    v: int
    bubbles: tuple[float, float, float]


FIGURES = [
    Published(4, 1, (27.3, 15.8, 8.6)),
    Published(4, 2, (15.8, 8.6, 4.5)),
    Published(4, 4, (8.6, 4.5, 2.3)),
    Published(8, 1, (46.7, 30.4, 17.9)),
    Published(8, 2, (30.4, 17.9, 9.9)),
    Published(8, 4, (17.9, 9.9, 5.2)),
]


@pytest.mark.parametrize("published", FIGURES, ids=lambda one: f"d={one.d} v={one.v}")
def test_the_bubble_has_the_published_size(published: Published) -> None:
    d, v, bubbles = published
    for m, expected in zip((8, 16, 32), bubbles, strict=True):
        assert bubble(in_turns(m, d, v)) == expected == round(100 * (d - 1) / (v * m + d - 1), 1)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("m", [8, 12, 32])
def test_each_worker_keeps_the_promised_number_of_micro_batches(m: int, v: int) -> None:
    promised = [(v - 1) * 4 + 2 * (4 - r) - 1 for r in range(4)]
    assert peaks(in_turns(m, 4, v)) == [min(kept, m * v) for kept in promised]


@pytest.mark.parametrize("d", range(2, 6))
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("m", [5, 6, 7, 9, 11, 13])
def test_the_bubble_is_as_small_where_micro_batches_are_no_multiple_of_devices(
    m: int, d: int, v: int
) -> None:
    ticks = 2 * v * max(m, d) + 2 * (d - 1)  # fewer than devices: nothing is faster than one way
    assert len(in_turns(m, d, v).ticks) <= ticks


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("recomputed", [0, 1])
def test_interleaving_one_partition_per_worker_is_1f1b(m: int, recomputed: int) -> None:
    one_each = plan("interleaved", m, 4, recomputed=recomputed)
    assert one_each == plan("1f1b", m, 4, recomputed=recomputed)


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0, 2), (0, 1, 2, 1)])
def test_partitions_that_are_not_dealt_out_in_turns_are_refused(placement: Sequence[int]) -> None:
    with pytest.raises(ValueError) as caught:
        plan("interleaved", 4, 4, placement)
    assert "as in devices=['cuda:0', 'cuda:1', 'cuda:0', 'cuda:1']" in str(caught.value)
    assert f"the workers of the partitions are {list(placement)}" in str(caught.value)


def test_the_grid_of_two_workers_with_two_partitions() -> None:
    columns = {
        0: "F00 F10 F02 F12 F20 B02 F30 B12 F22 B00 F32 B10     B22     B32 B20 B30",
        1: "    F01 F11 F03 B03 F13 B13 F21 B01 F31 B11 F23 B23 F33 B33 B21 B31",
    }
    found = in_turns(4, 2, 2)
    for worker, row in columns.items():
        cells = [row[4 * k : 4 * k + 3].strip() for k in range(len(found.ticks))]
        shown = [
            "".join(f"{a.kind}{a.i}{a.j}" for a in tick if found.placement[a.j] == worker)
            for tick in found.ticks
        ]
        assert shown == cells
