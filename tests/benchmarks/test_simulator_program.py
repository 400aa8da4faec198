"""Tests the simulator on cases computed by hand."""

from __future__ import annotations

import pytest
from _simulator import Plan, Simulation, Transfer, simulate

CHAIN = (Transfer(0, 1, 10), Transfer(1, 2, 10))


def run(
    m: int,
    n: int,
    *,
    kept: int = 0,
    seconds: tuple[float, float] = (1.0, 2.0),
    transfers: tuple[Transfer, ...] = CHAIN,
    bandwidth: float = float("inf"),
    latency: float = 0.0,
    copy_streams: bool = True,
    direct_skips: bool = True,
) -> Simulation:
    """Simulates a plan with equal forward times and equal backward times."""
    transfers = tuple(t for t in transfers if t.target < n)
    forward, backward = seconds
    plan = Plan(
        m, n, lambda i, j: forward, lambda i, j: forward, lambda i, j: backward, kept, transfers,
        bandwidth=bandwidth, latency=latency, copy_streams=copy_streams, direct_skips=direct_skips,
    )  # fmt: skip
    return simulate(plan)


def times(simulation: Simulation, kind: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns the start and end of each task of a kind."""
    return {(t.i, t.j): (t.start, t.end) for t in simulation.tasks if t.kind == kind}


def test_equal_tasks_take_m_plus_n_minus_one_clocks_each_way() -> None:
    found = run(4, 3)
    assert max(end for _, end in times(found, "forward").values()) == 6
    assert found.seconds == 6 + 12
    assert found.bubble == pytest.approx(2 / 6)  # (n-1)/(m+n-1)


def test_a_task_starts_when_its_input_is_there_and_not_when_the_diagonal_is_over() -> None:
    durations = {(0, 0): 1.0, (0, 1): 10.0, (1, 0): 1.0, (2, 0): 1.0, (1, 1): 1.0, (2, 1): 1.0}
    of = lambda i, j: durations[i, j]  # noqa: E731
    found = simulate(Plan(3, 2, of, of, of, 0, [Transfer(0, 1, 0)]))
    assert times(found, "forward")[2, 0] == (2, 3)
    assert times(found, "forward")[1, 1] == (11, 12)


def test_a_gpu_recomputes_while_the_gradient_is_on_its_way() -> None:
    found = run(2, 2, kept=2, latency=0.5)
    assert times(found, "forward")[1, 1] == (2.5, 3.5)
    assert times(found, "recompute")[1, 1] == (3.5, 4.5)
    assert times(found, "backward")[1, 1] == (4.5, 6.5)
    assert times(found, "copy")[1, 0] == (6.5, 7)
    assert times(found, "recompute")[1, 0] == (6.5, 7.5)  # not while it is computed
    assert times(found, "backward")[1, 0] == (7.5, 9.5)


def test_without_copy_streams_a_copy_stops_both_devices() -> None:
    found = run(3, 2, bandwidth=10.0, copy_streams=False)
    assert [times(found, "forward")[i, 0] for i in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [times(found, "forward")[i, 1] for i in range(3)] == [(2, 3), (4, 5), (6, 7)]


def test_a_skip_goes_straight_or_through_every_device_in_between() -> None:
    skip = (*CHAIN, Transfer(0, 2, 100))
    assert [(h.source, h.target, h.bytes) for h in run(1, 3, transfers=skip).plan.hops()] == [
        *((0, 1, 10), (0, 2, 100), (1, 2, 10)),
    ]
    hops = run(1, 3, transfers=skip, direct_skips=False).plan.hops()
    assert [(h.source, h.target, h.bytes) for h in hops] == [(0, 1, 110), (1, 2, 110)]
