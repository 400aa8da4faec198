"""Tests torch.compile and threads: which compiles, which waits, and which random numbers they draw.

Order is forced by backends that wait: a backend is called in the middle of a compilation.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert import Pipe

pytestmark = [
    pytest.mark.slow,  # the first compilation imports for seconds
    pytest.mark.usefixtures("forget_compiled"),
    # Of dynamo: about itself, and of NumPy, which need not be there.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

WAIT = 30.0  # s; what should happen at once is given up after it
NEVER = 0.2  # s; how long to wait for what must not happen

same = torch.testing.assert_close


class Block(nn.Module):
    """A layer that users would compile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def batch(rows: int) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.double)


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Returns the output, and the gradient of each parameter."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *[p.grad for p in model.parameters()]]


# What is compiled at once -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_threads_that_compile_at_once_get_the_plain_models_results(backend: str) -> None:
    """Forward, backward and recompilation in four threads that a barrier keeps together."""
    plain = [Block().double() for _ in range(4)]
    compiled: list[Any] = [torch.compile(copy.deepcopy(b), backend=backend) for b in plain]
    together = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for rows in (3, 4, 1):
                x = batch(rows + k)
                together.wait(WAIT)
                same(step(compiled[k], x), step(plain[k], x))
        except BaseException as error:  # noqa: B036  raised below
            together.abort()
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors


def test_one_worker_compiles_at_a_time() -> None:
    inside: list[int] = []
    most: list[int] = []
    entered = threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        inside.append(1)
        most.append(len(inside))
        entered.wait(NEVER)  # gives others the time to come in
        inside.pop()
        return graph.forward

    layers: list[Any] = [
        torch.compile(nn.Linear(8, 8).double(), backend=backend) for _ in range(4)
    ]
    halves = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    pipes = [Pipe(half, [1, 1], devices=["cpu"] * 2, chunks=3) for half in halves]
    threads = [threading.Thread(target=pipe, args=(batch(6),)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    for pipe in pipes:
        pipe.close()
    assert max(most) == 1


def test_compiled_code_runs_while_another_worker_compiles() -> None:
    """F[1,0] is compiled, for a micro-batch of one row, until F[0,1] has run what it has got."""
    ran, compiling = threading.Event(), threading.Event()
    waited: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        if order:
            compiling.set()
            waited.append(ran.wait(WAIT))
        return graph.forward

    class Wait(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not order or compiling.wait(WAIT)
            return x

    class Ran(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.set()
            return x

    order = False
    first: Any = torch.compile(nn.Linear(8, 8).double(), backend=backend, dynamic=False)
    last: Any = torch.compile(nn.Linear(8, 8).double(), backend="eager", dynamic=False)
    module = nn.Sequential(first, Wait(), last, Ran())
    with Pipe(module, [1, 3], devices=["cpu"] * 2, chunks=2) as pipe, torch.no_grad():
        pipe(batch(4))  # two rows each
        ran.clear()
        order = True
        pipe(batch(3))
    assert waited == [True]


# Random numbers -----------------------------------------------------------------------------------


def drawn_after(race: bool) -> Tensor:
    """What the caller draws after a run in which F[1,0] compiles while F[0,1] draws."""
    torch._dynamo.reset()
    compiling, drawn = threading.Event(), threading.Event()
    compilations: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compilations.append(1)
        if len(compilations) == 2:  # for a micro-batch of one row
            compiling.set()
            drawn.wait(NEVER if race else 0)
        return graph.forward

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if race:
                assert compiling.wait(WAIT)
            y = x + torch.rand_like(x)
            drawn.set()
            return y

    first: Any = torch.compile(nn.Linear(8, 8).double(), backend=backend, dynamic=False)
    module = nn.Sequential(first, Noise())
    with Pipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never") as pipe:
        torch.manual_seed(1)
        with torch.no_grad():
            pipe(batch(3))
    assert len(compilations) == 2
    return torch.rand(3)


def test_a_compilation_does_not_undo_another_workers_draws() -> None:
    assert torch.equal(drawn_after(race=True), drawn_after(race=False))
