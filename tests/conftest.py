"""Gives every test a seed, and checks that it leaves no thread of pipert behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pipert.workers.worker import WorkerThread
from tests import simulated_gpus
from tests.simulated_gpus.selection import NAME, Selection

# Two threads that spin for each other slow small operations down tenfold when a core is busy.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if simulated_gpus.running() is not None:
        config.pluginmanager.register(Selection(), NAME)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("cuda") and cuda < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and cuda < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def worker_threads() -> set[threading.Thread]:
    """The threads of pipert that are alive."""
    return {thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)}


def wait_until_gone(threads: set[threading.Thread], seconds: float = 5.0) -> set[threading.Thread]:
    """Give threads that have been told to end the time to do so; return those that did not."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


@pytest.fixture(autouse=True)
def _no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves threads behind, not the one after it."""
    before = worker_threads()
    yield
    new = worker_threads() - before
    if new and wait_until_gone(new, 0.5):
        gc.collect()  # a pipe in a failed test's frames is not a leak of pipert's
        left = wait_until_gone(new)
        assert not left, f"the test left threads behind: {sorted(t.name for t in left)}"
