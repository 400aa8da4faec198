"""Shared by the tests of the benchmarks, which import scripts outside any package.

Each runs on a thread of its own (``tests/own_thread.py`` says why).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

ROOT = Path(__file__).parents[2]

# Where Python looks when a benchmark or an example is started as a script.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm's monitor is a thread that outlives the progress bar."""
    if sys.modules.get("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
