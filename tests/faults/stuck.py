"""Layers that do not return until they are told to, and pipes that have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe, PipelineTimeout, WorkerBusyError
from tests.activations import Activations, until

WAIT = 20.0  # s; what a test waits for is taken for a hang after it
SHORT = 0.05  # s; the time limit of a call that is to miss it


class Blocks(nn.Module):
    """Multiplies by its weight; in ``F[i,j]`` with ``i == at`` it does not return.

    The first column of its input is the number of the row, and a micro-batch is one row.
    """

    def __init__(self, at: int | None = None, seen: dict[int, Activations] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.9, 1.2]))
        self.at = at
        self.seen = seen
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.afterwards: Callable[[], object] = lambda: None

    def never_returns(self) -> None:
        self.entered.set()
        assert self.go_on.wait(WAIT), "nobody let this layer go on"
        self.afterwards()

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach()[0, 0].item())
        if i == self.at and not self.go_on.is_set():
            self.never_returns()
        y = torch.cat([x[:, :1], (x[:, 1:] * self.weight).tanh()], 1)
        if self.seen is not None:
            self.seen.setdefault(i, Activations()).add(y)
        return y


class Stuck:
    """A pipe of ``n`` partitions that gets stuck in ``F[i,j]``; a context manager that frees it."""

    def __init__(
        self,
        i: int = 1,
        j: int = 1,
        n: int = 2,
        m: int = 3,
        seen: dict[int, Activations] | None = None,
        **options: Any,
    ) -> None:
        layers = [Blocks(i if k == j else None, seen) for k in range(n)]
        self.layer = layers[j]
        self.plain = nn.Sequential(*layers)
        self.pipe = Pipe(self.plain, [1] * n, devices=["cpu"] * n, chunks=m, **options)
        self.x = torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.let_go()
        self.pipe.close(timeout=WAIT)

    def times_out(self, call: Callable[[], Any] | None = None) -> PipelineTimeout:
        """Call the pipe, which gets stuck; return what it raises, without its traceback.

        Where the machine has other work, the time may be over before the layer has begun. Then
        there is another attempt.
        """
        for _ in range(20):
            try:
                (call or (lambda: self.pipe(self.x, timeout=SHORT)))()
            except PipelineTimeout as error:
                if "never_returns" in str(error):
                    return error.with_traceback(None)
            self.until_back()
            self.get_stuck_again()
        raise AssertionError("no call got stuck")

    def get_stuck_again(self) -> None:
        self.layer.entered.clear()
        self.layer.go_on.clear()

    def let_go(self) -> None:
        self.layer.go_on.set()

    def until_back(self, call: Callable[[], Any] | None = None) -> Any:
        """Let the layer return, and what a call returns as soon as the pipe takes calls."""
        self.let_go()
        return until_back(call or (lambda: self.pipe(self.x, timeout=WAIT)))

    def is_right(self) -> bool:
        """Whether a step of the pipe, once it takes calls, is that of the plain module."""
        self.pipe.zero_grad()
        y = self.until_back()
        y[:, 1:].square().sum().backward()
        expected = self.plain(self.x)
        parameters = list(self.plain.parameters())
        grads = torch.autograd.grad(expected[:, 1:].square().sum(), parameters)
        found = [parameter.grad for parameter in parameters]
        return torch.allclose(y, expected) and all(
            mine is not None and torch.allclose(mine, grad)
            for mine, grad in zip(found, grads, strict=True)
        )


def until_back(call: Callable[[], Any]) -> Any:
    """What ``call`` returns when workers are busy no more."""
    results: list[Any] = []

    def works() -> bool:
        try:
            results.append(call())
        except WorkerBusyError:
            return False
        return True

    assert until(works), "the worker never came back"
    return results[0]
