"""Lets the tests of the benchmarks import scripts outside any package.

Each test runs on a thread of its own (``tests/helpers/own_thread.py`` says why).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.own_thread import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

ROOT = Path(__file__).parents[2]

# As when Python starts a benchmark or an example as a script.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables tqdm's monitor, a thread that outlives the progress bar."""
    if sys.modules.get("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
