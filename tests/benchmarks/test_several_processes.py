"""The benchmark of several processes, at its smallest, runs, compares, and names missed bars."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

pytest.importorskip("torchgpipe", reason="the benchmarks' tables need it")

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(120)]  # two processes import torch


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return importlib.import_module("several_processes")


def test_all_runtimes_compute_the_same_and_a_missed_bar_is_reported(benchmark: ModuleType) -> None:
    table = benchmark.measured("linears", 1, 0.001)  # which also compares the losses
    names = [benchmark.TORCHS, benchmark.OURS, benchmark.ONE_PROCESS]
    assert [row.cells[0] for row in table] == names
    assert [len(row.missed) for row in table] == [0, 1, 0]
