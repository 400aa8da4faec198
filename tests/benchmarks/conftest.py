"""Lets the tests of the benchmarks import scripts outside any package.

Each test runs on a thread of its own (``tests/own_thread.py`` says why).
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

ROOT = Path(__file__).parents[2]

# As when Python starts a benchmark or an example as a script.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables tqdm's monitor, a thread that outlives the progress bar."""
    if sys.modules.get("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.fixture(autouse=True)
def rounds_of_no_other_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each test count rounds of its own, which the verdict tells of."""
    if sys.modules.get("_measure"):
        monkeypatch.setattr("_measure._ROUNDS", Counter())
