"""P5: a forked child has none of its parent's threads and starts its own; nobody hangs.

A child that hangs is ended by an alarm and then has another exit code.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipert import Pipe
from pipert.workers import pool as pool_module
from pipert.workers.worker import WorkerThread

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WAIT = 10.0  # s; what should happen at once is given up after it

ROWS = torch.arange(4.0).reshape(4, 1)

RIGHT, WRONG, RAISED = 40, 41, 42


class Double(nn.Module):
    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        return x * 2


def two(first: nn.Module | None = None, checkpoint: str = "never") -> Pipe:
    layers = nn.Sequential(first or Double(), Double())
    return Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=4, checkpoint=checkpoint)


def right(pipe: Pipe) -> bool:
    return torch.equal(pipe(ROWS), ROWS * 4)


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(ROWS).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def child(check: Callable[[], bool]) -> int:
    """The exit code of a forked child that does ``check``: ``RIGHT`` if it holds there."""
    pid = os.fork()
    if pid == 0:
        code = RAISED
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT))
            code = RIGHT if check() else WRONG
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Makes a pipe that has run, and has threads."""
    with two() as pipe:
        pipe(ROWS)
        yield pipe


def test_a_child_runs_the_pipe_on_threads_of_its_own() -> None:
    threads: list[threading.Thread] = []
    with two(Double(lambda: threads.append(threading.current_thread()))) as pipe:
        pipe(ROWS)
        old = set(threads)

        def check() -> bool:
            threads.clear()
            right = torch.equal(pipe(ROWS), ROWS * 4)
            return right and not old & set(threads) and threading.current_thread() not in threads

        assert child(check) == RIGHT


@pytest.mark.skipif(
    torch.cuda.is_available() or torch.__version__ < "2.12",
    reason="autograd refuses it in a child, with CUDA and as conftest.py sets up torch 2.11",
)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_child_can_train(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    plain = [parameter.clone() for parameter in gradients(layers)]

    def train() -> bool:
        return all(map(torch.allclose, gradients(own), plain))

    with Pipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=4, checkpoint=checkpoint) as own:
        train()
        assert child(train) == RIGHT


def test_the_parent_keeps_its_threads_when_a_child_closes_the_pipe(pipe: Pipe) -> None:
    before = list(pipe._runtime.pool._threads)
    child(lambda: pipe.close() is None)
    assert right(pipe) and pipe._runtime.pool._threads == before


# Forked in the middle of something that another thread does


def test_a_child_forked_while_threads_are_started_can_close_the_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(WorkerThread):
        def start(self) -> None:
            reached.set()
            go_on.wait(WAIT)
            super().start()

    monkeypatch.setattr(pool_module, "WorkerThread", Slow)
    with two() as pipe:
        thread = threading.Thread(target=lambda: pipe(ROWS), daemon=True)
        thread.start()
        reached.wait(WAIT)
        code = child(lambda: pipe.close() is None)
        go_on.set()
        thread.join(WAIT)
    assert code == RIGHT


def test_a_child_forked_while_a_layer_draws_random_numbers_can_draw_some() -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    class Slow(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.rand_like:
                reached.set()
                go_on.wait(WAIT)
            return func(*args, **kwargs or {})

    with Pipe(nn.Sequential(Noise()), [1], devices=["cpu"]) as pipe:

        def start() -> None:
            with Slow():
                pipe(ROWS)

        thread = threading.Thread(target=start, daemon=True)
        thread.start()
        assert reached.wait(WAIT)
        code = child(lambda: pipe(ROWS).shape == (4, 1))
        go_on.set()
        thread.join(WAIT)
    assert code == RIGHT


# multiprocessing


@pytest.mark.slow
def test_a_pool_of_multiprocessing_can_run_the_pipe(pipe: Pipe) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        workers = multiprocessing.get_context("fork").Pool(2)
    with workers:
        results = [workers.apply_async(_is_right) for _ in range(4)]
        assert [result.get(WAIT) for result in results] == [True] * 4


def _is_right() -> bool:
    with two() as pipe:
        return right(pipe)
