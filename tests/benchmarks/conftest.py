"""Shared by the tests of the benchmarks, which import scripts outside any package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where Python looks when a benchmark or an example is started as a script.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm's monitor is a thread that outlives the progress bar."""
    if sys.modules.get("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
