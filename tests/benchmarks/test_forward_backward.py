"""The benchmark of whole steps, at its smallest, runs, counts, and names missed bars."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

pytest.importorskip("torchgpipe", reason="the benchmarks run torchgpipe beside pipert")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("forward_backward")


@pytest.mark.sweep
@pytest.mark.timeout(240)  # two rounds of eight runtimes, two of them processes
def test_all_runtimes_compute_the_same_and_each_has_its_row(benchmark: ModuleType) -> None:
    table = benchmark.convolving(1, 0.001)  # which also compares the losses
    names = [row.cells[0].partition(",")[0] for row in table]
    assert names == ["plain", *["torchgpipe"] * 3, "Schedule1F1B", *["pipert"] * 3, "half of plain"]
    assert [len(row.missed) for row in table].count(1) == 3


@pytest.mark.sweep  # two seconds of sleep; those that take turns sleep below
def test_steps_of_sleeping_stages_overlap(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "M", 6)
    monkeypatch.setattr(benchmark, "T", 0.005)
    autograd, *schedules = benchmark.sleeping(1, 1e6)
    for row in schedules:
        assert float(row.cells[2]) < float(autograd.cells[2]) and not row.missed


@pytest.mark.parametrize(("n", "m"), [(2, 1), (3, 2), (3, 6)])
def test_activations_are_counted(benchmark: ModuleType, n: int, m: int) -> None:
    ((_, autograd, gpipe, one_f_one_b, bar, *_),) = [row.cells for row in benchmark.living(n, m)]
    assert float(autograd) == float(gpipe) == n * m
    assert 0 < float(one_f_one_b) <= float(bar) <= n * m


def test_a_host_cost_is_compared_with_autograd_s(benchmark: ModuleType) -> None:
    (row,) = benchmark.host_cost(2, 3, "never", 1)
    case, *cells = row.cells
    autograd, gpipe, one_f_one_b, *ratios = map(float, cells)
    assert case == "n=2 m=3, never" and not row.missed
    for cost, ratio in zip((gpipe, one_f_one_b), ratios, strict=True):
        assert abs(cost / autograd - ratio) < 0.1 + ratio / autograd


def test_workers_with_several_partitions_have_their_rows(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "T", 0.001)
    cases = [row.cells[0] for row in benchmark.sleeping_in_turns(3, 1)]
    assert cases == ["m=3, v=1", "m=3, v=2", "m=3, v=4"]
