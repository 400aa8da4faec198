"""Tests loans of turns: the cores on which drivers run."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert._typing import Value
from pipert.driven import loans
from pipert.driven.loans import Loans
from pipert.stage.stage import Stage
from tests.activations import until
from tests.observers import Log

if sys.platform != "linux":
    pytest.skip("elsewhere nobody is bound to a core", allow_module_level=True)

CORES = frozenset(os.sched_getaffinity(0))

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="with one core there is no other")


@pytest.fixture(params=sorted(CORES)[:2])
def core(request: Any) -> Iterator[int]:
    """Returns a core on which the current thread may run."""
    os.sched_setaffinity(0, {request.param})
    yield request.param
    os.sched_setaffinity(0, CORES)


def test_a_driver_is_woken_on_the_core_of_its_worker(
    core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken_on = []
    monkeypatch.setattr(loans, "allow", lambda _: woken_on.append(os.sched_getaffinity(0)))
    of_one = Loans(n=1, binds=True)
    driver = threading.Thread(target=of_one.take)
    driver.start()
    of_one.bind(driver)
    of_one.end()
    driver.join()
    assert woken_on == [{core}]


@pytest.fixture
def stage() -> Any:
    return SimpleNamespace(place=SimpleNamespace(j=0))


def test_a_worker_is_woken_on_the_core_of_its_driver(
    core: int, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken_on = []
    monkeypatch.setattr(loans, "allow", lambda _: woken_on.append(os.sched_getaffinity(0)))
    of_one = Loans(n=1, binds=True)
    worker = threading.Thread(target=of_one.lend, args=(stage, lambda: False))
    worker.start()
    assert of_one.take() is stage
    of_one.give_back(0, ())
    worker.join()
    assert woken_on == [{core}]


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_no_longer_waits_is_not_bound_to_a_core(
    late: bool, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_one, bind = Loans(n=1, binds=True), loans.bind
    returned: SimpleQueue[None] = SimpleQueue()

    def wait(*_: Any) -> Any:
        of_one.take()
        returned.get()
        raise ZeroDivisionError

    def lend() -> None:
        with pytest.raises(ZeroDivisionError):
            of_one.lend(stage, lambda: False)
        cores.append(os.sched_getaffinity(0))
        returned.get()
        cores.append(os.sched_getaffinity(0))

    def bind_late(thread: int) -> bool:
        returned.put(None)
        assert until(lambda: len(cores) == 1)
        return bind(thread)

    cores: list[set[int]] = []
    monkeypatch.setattr(of_one, "_wait", wait)
    worker = threading.Thread(target=lend)
    worker.start()
    assert until(lambda: not of_one._lent.qsize() and bool(of_one._workers))
    if late:
        monkeypatch.setattr(loans, "bind", bind_late)
        of_one.give_back(0, ())
    else:
        of_one.give_back(0, ())
        returned.put(None)
        assert until(lambda: len(cores) == 1)
    returned.put(None)
    worker.join()
    assert cores == [CORES, CORES]


def test_a_forked_child_binds_no_thread_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    of_one, bound = Loans(n=1, binds=True), list[int]()
    of_one._workers[0] = threading.get_native_id(), set(CORES)
    monkeypatch.setattr(loans, "bind", bound.append)
    of_one.give_back(0, ())
    assert bound == [threading.get_native_id()]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    of_one.give_back(0, ())
    assert len(bound) == 1


def test_a_pipe_works_where_threads_cannot_be_bound_to_cores(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(pid: int, cores: Any) -> None:
        asked.append(pid)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    model = Model()
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=2) as pipe:
        assert pipe(torch.ones(2, 3)).shape == (2, 3)
    assert len(asked) == 12  # for each F, the driver, the worker, and what allows it all


def test_the_next_partition_does_not_wait_for_a_worker_to_wake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, waited = threading.Event(), []
    lend = Loans.lend

    def lend_for_long(self: Loans, stage: Stage, is_lost: Callable[[], bool]) -> Any:
        value = lend(self, stage, is_lost)
        if stage.place.j == 0:
            waited.append(begun.wait(10))
        return value

    monkeypatch.setattr(Loans, "lend", lend_for_long)
    model = Model()
    model.second.register_forward_pre_hook(lambda *_: begun.set())
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=1) as pipe:
        pipe(torch.ones(1, 3))
    assert waited == [True]


def test_observers_see_a_partition_end_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, lend = Log(), Loans.lend

    def lend_for_long(self: Loans, stage: Stage, is_lost: Callable[[], bool]) -> Any:
        value = lend(self, stage, is_lost)
        if stage.place.j == 0:
            threading.Event().wait(0.1)  # the next would begin meanwhile
        return value

    monkeypatch.setattr(Loans, "lend", lend_for_long)
    with pipert.pipeline(Model(), ["second"], devices=["cpu"] * 2, chunks=1) as pipe:
        pipe.add_observer(log)
        pipe(torch.ones(1, 3))
    told = [(name, what[0].partition) for name, *what in log.events if name.startswith("task")]
    started, finished = "task_started", "task_finished"
    assert told == [(started, 0), (finished, 0), (started, 1), (finished, 1)]


@pytest.mark.parametrize("when", ["before", "told", "returned"])
@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_thrown_into_a_driver_that_returns_a_turn_is_raised(
    when: str, caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back = Loans.give_back

    def fail_once(self: Loans, j: int, value: Value, tell: Any = None) -> None:
        if tell is None:
            give_back(self, j, value)
            return
        monkeypatch.setattr(Loans, "give_back", give_back)
        if when == "told":
            tell()
        elif when == "returned":
            give_back(self, j, value, tell)
        raise ZeroDivisionError

    monkeypatch.setattr(Loans, "give_back", fail_once)
    model = Catching() if caught else Model()
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=2) as pipe:
        with pytest.raises(ZeroDivisionError):
            pipe(torch.ones(2, 3))
        assert pipe(torch.ones(2, 3)).shape == (2, 3)


def test_a_bound_worker_is_freed_even_if_its_turn_returns_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = loans.bind

    def fail_once(thread: int) -> bool:
        bound = bind(thread)
        if threading.current_thread().name.startswith("pipert-driver"):
            monkeypatch.setattr(loans, "bind", bind)
            raise ZeroDivisionError
        return bound

    model = Model()
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=1) as pipe:
        pipe(torch.ones(1, 3))
        monkeypatch.setattr(loans, "bind", fail_once)
        with pytest.raises(ZeroDivisionError):
            pipe(torch.ones(1, 3))
        pipe(torch.ones(1, 3))
        assert model.first.cores == CORES


class Layer(nn.Linear):
    """A layer that notes the cores on which it may run."""

    cores: set[int]

    def forward(self, x: Tensor) -> Tensor:
        self.cores = os.sched_getaffinity(0)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(3, 3), Layer(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


class Catching(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        try:
            z: Tensor = self.second(y)
        except ZeroDivisionError:
            z = self.second(y)
        return z


def test_layers_run_on_all_cores_of_their_worker() -> None:
    model = Model()
    with pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=2) as pipe:
        pipe(torch.ones(2, 3))
        assert model.first.cores == model.second.cores == CORES
        core = min(CORES)
        for thread in threading.enumerate():
            if thread.name == "pipert-cpu-1":
                os.sched_setaffinity(thread.native_id or 0, {core})
        for _ in range(2):  # the same drivers again
            pipe(torch.ones(2, 3))
            assert model.first.cores == CORES
            assert model.second.cores == {core}
