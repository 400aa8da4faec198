"""Tests how any model ends: errors, timeouts, closing, exceptions thrown in from outside.

Guarantees of all pipes are tested by running the tests of ``Pipe`` with ``--any-model``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipert
from pipert.any_model.model import MicroBatchThread
from pipert.errors import PipelineTimeout, PipertError, WorkerBusyError
from pipert.layers.random_numbers import current_task
from pipert.pipes.module_pipe import ModulePipe
from tests.conftest import wait_until_gone
from tests.helpers.activations import until


def nothing(x: Tensor) -> None:
    """Does nothing."""


class Model(nn.Module):
    """Two layers; the test chooses the code between them and the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), Second()
        self.own_code: Callable[[Tensor], Any] = nothing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.own_code(x)
        y: Tensor = self.second(x)
        return y


class Second(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.act: Callable[[Tensor], Any] = nothing

    def forward(self, x: Tensor) -> Tensor:
        self.act(x)
        return super().forward(x)


def pipe_of(model: nn.Module, **options: Any) -> ModulePipe:
    return pipert.pipeline(model, ["second"], devices=["cpu"] * 2, chunks=3, **options)


X = torch.ones(6, 3)


def total(y: Tensor, target: Any) -> Tensor:
    return y.sum()


def is_right(pipe: Any, model: Model) -> bool:
    return torch.allclose(pipe(X), model(X))


def microbatch_threads() -> set[MicroBatchThread]:
    return {thread for thread in threading.enumerate() if isinstance(thread, MicroBatchThread)}


def fail(x: Any) -> Any:
    raise ArithmeticError("on purpose")


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("where", ["own code", "layer", "loss"])
@pytest.mark.parametrize("way", ["call", "step"])
def test_an_error_says_where_it_occurred_and_leaves_no_tensor_alive(where: str, way: str) -> None:
    if (where, way) == ("loss", "call"):
        pytest.skip("a call has none")
    model = Model()
    seen: list[weakref.ref[Tensor]] = []
    model.own_code = lambda x: seen.append(weakref.ref(x)) or (where == "own code" and fail(x))
    model.second.act = lambda x: where == "layer" and fail(x)
    loss = total if where != "loss" else lambda y, target: fail(y)
    with pipe_of(model) as pipe:
        with pytest.raises(ArithmeticError) as caught:
            if way == "call":
                pipe(X)
            else:
                pipe.forward_backward(X, loss_fn=loss)
        j = int(where != "own code")
        assert caught.value.__notes__[0].startswith(f"in forward F[0,{j}]: partition {j} on cpu")
        del caught
        assert seen and until(lambda: all(ref() is None for ref in seen))
        model.own_code = model.second.act = nothing
        assert is_right(pipe, model)


def test_a_timeout_shows_the_stack_of_a_micro_batch_and_leaves_the_pipe_usable() -> None:
    model, go_on = Model(), threading.Event()

    def hangs_in_own_code(x: Tensor) -> None:
        go_on.wait()

    model.own_code = hangs_in_own_code
    with pipe_of(model) as pipe:
        with pytest.raises(PipelineTimeout, match="in hangs_in_own_code"):
            pipe(X, timeout=0.1)
        with pytest.raises(WorkerBusyError):
            pipe(X)
        go_on.set()
        assert until(lambda: all(worker.doing is None for worker in pipe.statistics().workers))
        assert is_right(pipe, model)


@pytest.mark.parametrize("where", ["own code", "layer"])
def test_a_forward_may_close_the_pipe(where: str) -> None:
    model = Model()
    pipe = pipe_of(model)
    if where == "own code":
        model.own_code = lambda x: pipe.close()
    else:
        model.second.act = lambda x: pipe.close()
    with pytest.raises(pipert.PipeClosedError):
        pipe(X)
    assert not wait_until_gone({*microbatch_threads()})


@pytest.mark.parametrize("where", ["own code", "layer"])
def test_an_exception_thrown_into_a_thread_is_raised_and_the_next_call_is_right(where: str) -> None:
    model = Model()

    def hit(x: Tensor) -> None:
        ident = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ArithmeticError))

    if where == "own code":
        model.own_code = hit
    else:
        model.second.act = hit
    with pipe_of(model) as pipe:
        with pytest.raises(ArithmeticError):
            pipe(X)
        model.own_code = model.second.act = nothing
        assert is_right(pipe, model)


def test_an_exception_thrown_into_a_waiting_thread_is_raised() -> None:
    """It is raised when the thread takes the next partition, which is handed back nevertheless."""
    model, passed, due = Model(), threading.Semaphore(0), [True]

    def hit_the_others(x: Tensor) -> None:
        if not due:
            return
        due.clear()
        for _ in range(2):
            assert passed.acquire(timeout=10)  # both are in the middle of their forward
        for thread in microbatch_threads():
            if thread is not threading.current_thread():
                ident, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ArithmeticError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    with pipe_of(model) as pipe:
        pipe.chunks = 2  # no thread is at rest: that would die with the next task
        pipe(X)
        model.own_code = lambda x: passed.release()
        model.second.act = hit_the_others
        with pytest.raises((ArithmeticError, pipert.WorkerDiedError)):
            pipe(X)
        model.second.act = nothing
        assert is_right(pipe, model)


class Swallows(Model):
    """A model that catches whatever a layer raises, and goes on."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.own_code(x)
        for _ in range(3):
            try:
                x = self.second(x)
            except BaseException:  # noqa: B036
                pass
        return x


def test_a_forward_that_catches_its_unwinding_is_unwound_again() -> None:
    model = Swallows()
    calls: list[bool] = []
    model.own_code = lambda x: calls.append(True) or (len(calls) == 3 and fail(x))
    with pipe_of(model) as pipe:
        with pytest.raises(ArithmeticError):
            pipe(X)
        model.own_code = nothing
        assert is_right(pipe, model)


def test_an_idle_thread_keeps_nothing_of_its_last_micro_batch() -> None:
    model = Model()
    seen: list[Any] = []
    with pipe_of(model) as pipe:
        pipe.forward_backward(X, loss_fn=total)
        gc.collect()
        assert until(lambda: all(thread.microbatch is None for thread in microbatch_threads()))
        for thread in microbatch_threads():
            thread.in_queue.put(Looks(seen))
        assert until(lambda: len(seen) == len(microbatch_threads()) > 0)
    assert set(seen) == {(None, True, True)}


class Looks:
    """A task that notes which contexts are active in its thread."""

    what: Any = None

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def receive(self) -> Any:
        return ()

    def execute(self, received: Any) -> Any:
        modes: Any = torch.overrides._get_current_function_mode_stack
        self._seen.append((current_task(), torch.is_grad_enabled(), not modes()))

    def send(self, result: Any) -> None:
        pass

    def abandon(self, error: BaseException) -> None:
        pass


class Forking(nn.Module):
    """A model whose own code forks a child, which tries to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.statuses: Queue[int] = Queue()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        child = os.fork()
        if child == 0:
            try:
                self.b(y)
            except PipertError:
                os._exit(3)
            os._exit(4)
        self.statuses.put(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        found: Tensor = self.b(y)
        return found


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_forked_in_a_forward_does_not_wait_for_turns() -> None:
    model = Forking()
    with pipert.pipeline(model, ["b"], devices=["cpu", "cpu"], chunks=2) as pipe:
        pipe(torch.ones(2, 3)).sum().backward()
    assert [model.statuses.get_nowait() for _ in range(2)] == [3, 3]
