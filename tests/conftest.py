"""Gives every test a seed and a check that it leaves no thread of pipert behind.

On request a test also runs without the garbage collector, measures layers only once, or has
torch's compiled code reset.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipert.balance import balance_by_time, layer_times
from pipert.balance.by_calls import choose_cuts
from pipert.workers.worker import WorkerThread
from tests import simulated_gpus
from tests.helpers.collection import settle
from tests.simulated_gpus.selection import NAME, Selection

# With two threads, each spins for the other: on a busy machine small operations take ten times as
# long.
torch.set_num_threads(1)

if torch.__version__ < "2.12" and not torch.cuda.is_available():
    # In a CUDA build without a GPU, the first thread that compiles makes an object for all, which
    # ends with that thread. Not in the package: autograd's threads would start before a fork.
    torch._C._ensureCUDADeviceGuardSet()


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
    else:  # torch.manual_seed would record three stacks, for devices that may be initialized later
        torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    yield
    _freeze()


def _freeze() -> None:
    """Hides all existing objects from the garbage collector.

    Modules and tests are millions of objects, which would cost each collection up to a second. No
    test needs them collected.
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
    """Turns the garbage collector off: reference counting alone has to free everything."""
    with _without_gc():
        yield


@pytest.fixture(scope="module")
def no_gc_in_module() -> Iterator[None]:
    """Turns it off for all tests of a file at once: a collection takes longer than some tests."""
    with _without_gc():
        yield


@pytest.fixture
def one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes layers be measured once where no time is given, instead of for a second."""
    for measures in (balance_by_time, choose_cuts, layer_times):
        assert measures.__kwdefaults__ is not None
        monkeypatch.setitem(measures.__kwdefaults__, "timeout", 0.0)


@pytest.fixture
def forget_compiled() -> Iterator[None]:
    """Resets torch's compiled code before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def worker_threads() -> set[threading.Thread]:
    """Returns the threads of pipert that are alive."""
    return {thread for thread in threading.enumerate() if isinstance(thread, WorkerThread)}


def wait_until_gone(threads: set[threading.Thread], seconds: float = 5.0) -> set[threading.Thread]:
    """Waits for threads to end, ``seconds`` in all; returns those that did not."""
    settle()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


@pytest.fixture(autouse=True)
def _no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads behind, rather than the next one."""
    before = worker_threads()
    yield
    new = worker_threads() - before
    if new and wait_until_gone(new, 0.5):
        gc.collect()  # a pipe in a failed test's frames is not a leak of pipert's
        left = wait_until_gone(new)
        assert not left, f"the test left threads behind: {sorted(t.name for t in left)}"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Makes a process group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
