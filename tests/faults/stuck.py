"""Provides layers that do not return until told to, and pipes in which such a layer is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe, PipelineTimeout, WorkerBusyError, is_recomputing
from tests.helpers.activations import Activations, until
from tests.helpers.failing_steps import acting

WAIT = 20.0  # s, after which a wait counts as a hang
SHORT = 0.05  # s, the timeout of a call that is meant to exceed it

WHERES = ("call", "forward", "recomputation", "backward")
"""The places where a run gets stuck: the forward of a call, or a phase of a whole step."""


class Blocks(nn.Module):
    """A layer with a weight that does not return from its ``phase`` of micro-batch ``at``.

    The first column of its input holds the row numbers, and a micro-batch is one row.
    """

    def __init__(
        self,
        at: int | None = None,
        seen: dict[int, Activations] | None = None,
        phase: str = "forward",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.9, 1.2]))
        self.at = at
        self.seen = {} if seen is None else seen
        self.phase = phase
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.afterwards: Callable[[], object] = lambda: None

    def never_returns(self) -> None:
        self.entered.set()
        assert self.go_on.wait(WAIT), "nobody let this layer go on"
        self.afterwards()

    def come_to(self, phase: str, i: int) -> None:
        if (phase, i) == (self.phase, self.at) and not self.go_on.is_set():
            self.never_returns()

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach()[0, 0].item())
        self.come_to("recomputation" if is_recomputing() else "forward", i)
        seen = self.seen.setdefault(i, Activations())
        y = seen.add((acting(x[:, 1:], lambda: self.come_to("backward", i)) * self.weight).tanh())
        return seen.add(torch.cat([x[:, :1], y], 1))


class Stuck:
    """A pipe of ``n`` partitions that gets stuck in micro-batch ``i`` of partition ``j``.

    As a context manager it frees the layer and closes the pipe. ``where`` is one of ``WHERES``.
    """

    def __init__(
        self,
        i: int = 1,
        j: int = 1,
        n: int = 2,
        m: int = 3,
        seen: dict[int, Activations] | None = None,
        where: str = "call",
        **options: Any,
    ) -> None:
        self.j = j
        self.whole, self.phase = where != "call", "forward" if where == "call" else where
        if self.whole:
            options.setdefault("checkpoint", "always" if where == "recomputation" else "never")
        layers = [Blocks(i if k == j else None, seen, self.phase) for k in range(n)]
        self.layer = layers[j]
        self.plain = nn.Sequential(*layers)
        self.pipe = Pipe(self.plain, [1] * n, devices=["cpu"] * n, chunks=m, **options)
        self.x = torch.cat([torch.arange(float(m)).unsqueeze(1), torch.rand(m, 2)], 1)

    def run(self, timeout: float = WAIT, **options: Any) -> Any:
        """Runs a call, or a whole step."""
        if not self.whole:
            return self.pipe(self.x, timeout=timeout)
        return self.pipe.forward_backward(
            self.x, loss_fn=loss, reduction="sum", timeout=timeout, **options
        )

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.let_go()
        self.pipe.close(timeout=WAIT)

    def times_out(
        self, call: Callable[[], Any] | None = None, shows: str = ""
    ) -> PipelineTimeout:
        """Calls the pipe, which gets stuck; returns its error, without the traceback.

        On a busy machine the timeout may expire before the layer has begun, or between the looks at
        the worker and at its stack, or before the error ``shows`` what is meant to be seen. Then
        the call is repeated.
        """
        for _ in range(20):
            try:
                (call or (lambda: self.run(SHORT)))()
            except PipelineTimeout as error:
                doing = error.workers[self.j].doing
                in_it = doing is not None and doing.phase == self.phase
                if in_it and "never_returns" in str(error) and shows in str(error):
                    return error.with_traceback(None)
            self.until_back()
            self.pipe.zero_grad()
            self.x.grad = None
            self.get_stuck_again()
        raise AssertionError("no call got stuck")

    def get_stuck_again(self) -> None:
        self.layer.entered.clear()
        self.layer.go_on.clear()

    def let_go(self) -> None:
        self.layer.go_on.set()

    def until_back(self, call: Callable[[], Any] | None = None) -> Any:
        """Lets the layer return; returns the result of a call made once the pipe takes calls."""
        self.let_go()
        return until_back(call or self.run)

    def is_right(self) -> bool:
        """Tells whether a step, once the pipe takes calls, equals that of the plain module."""
        self.pipe.zero_grad()
        y = self.until_back()
        if not self.whole:
            loss(y).backward()
        expected = self.plain(self.x)
        return torch.allclose(y, loss(expected) if self.whole else expected) and self.has(1)

    def has(self, times: float) -> bool:
        """Tells whether each ``.grad`` is ``times`` times the gradient of one step."""
        parameters = list(self.plain.parameters())
        grads = torch.autograd.grad(loss(self.plain(self.x)), parameters)
        return all(
            parameter.grad is not None and torch.allclose(parameter.grad, times * grad)
            for parameter, grad in zip(parameters, grads, strict=True)
        )


def loss(y: Tensor, target: Any = None) -> Any:  # torch does not type Tensor.backward
    return y[:, 1:].square().sum()


def until_back(call: Callable[[], Any]) -> Any:
    """Repeats ``call`` until no worker is busy, and returns its result."""
    results: list[Any] = []

    def works() -> bool:
        try:
            results.append(call())
        except WorkerBusyError:
            return False
        return True

    assert until(works), "the worker never came back"
    return results[0]
