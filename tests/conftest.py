"""What every test gets: a seed, and a check that it leaves no thread of pipert behind.

And what it may ask for: to run without the collector of cycles.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pipert.balance import balance_by_time, layer_times
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
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # that would write down three stacks for devices that never come
        torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    yield
    _freeze()


def _freeze() -> None:
    """Let the collector look no more at what is there now: for all tests that is a second a time.

    Modules and tests are millions of objects. What lives this long is no business of a test.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Without the collector of cycles: reference counting alone has to free everything."""
    with _without_gc():
        yield


@pytest.fixture(scope="module")
def no_gc_in_module() -> Iterator[None]:
    """The same for all tests of a file together: a collection takes longer than some of them."""
    with _without_gc():
        yield


@pytest.fixture
def one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever measures layers without saying for how long does so once, and not for a second."""
    for measures in (balance_by_time, layer_times):
        assert measures.__kwdefaults__ is not None
        monkeypatch.setitem(measures.__kwdefaults__, "timeout", 0.0)


@pytest.fixture
def forget_compiled() -> Iterator[None]:
    """What torch has compiled is one test's own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
