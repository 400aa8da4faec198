"""Lets the tests of the examples import scripts outside any package."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> ModuleType:
    """Imports the example that the test module is named after."""
    return importlib.import_module(request.module.__name__.removeprefix("test_"))


@pytest.fixture(
    params=["cpu,cpu", pytest.param("cuda:0,cuda:1", marks=pytest.mark.multi_gpu)]
)
def two_devices(request: pytest.FixtureRequest) -> str:
    """Returns the value of ``--devices`` for tests in which an example trains."""
    found: str = request.param
    return found


@pytest.fixture(autouse=True)
def no_thread_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables tqdm's monitor, a thread that outlives the progress bar."""
    if sys.modules.get("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
