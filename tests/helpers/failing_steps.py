"""Injects a fault at one place of a step, as ``tests/faults/injector.py`` does for calls.

In both, each micro-batch has two rows, whose first column holds the row numbers, and values may be
wrapped in a ``Box``. Here the loss may raise, too, and the caller's graph of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.faults.injector import Box, Setting, micro_batch_of

__all__ = ["Acts", "StepSetting", "acting"]


class _Acts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.act()
        return grads[0], None


def acting(x: Tensor, act: Any) -> Tensor:
    """Copies ``x``; the backward calls ``act()`` first."""
    y: Tensor = _Acts.apply(x, act)  # type: ignore[no-untyped-call]
    return y


class Acts(nn.Module):
    """A layer with a weight that calls ``act(phase, i)`` in F and B.

    The first column of its input holds the row numbers, and a micro-batch is one row.
    """

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.9, 1.2]))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        i = int(x.detach()[0, 0].item())
        self.act("forward", i)
        y = acting(x[:, 1:] * self.weight, lambda: self.act("backward", i)).tanh()
        return torch.cat([x[:, :1], y], 1)


class StepSetting(Setting):
    """A pipe whose steps fail at armed places of its site.

    Args:
        schedule: the argument of ``forward_backward``.
        recorded: whether the steps are recorded.
        *args: the arguments of ``Setting``.
    """

    def __init__(self, schedule: str, recorded: bool, *args: Any) -> None:
        super().__init__(*args)
        self.schedule = schedule
        self.recorded = recorded
        self.boxed = self._boxed
        self.grads: list[Tensor] = []
        self.before = nn.Parameter(torch.ones(3))  # in the caller's graph

    def loss(self, output: Any, target: Any) -> Tensor:
        y: Tensor = output.data if isinstance(output, Box) else output
        self.site.strike("loss", micro_batch_of(y), self.n - 1)
        return y[:, 1:].square().sum()

    def strike_before(self) -> None:
        self.site.strike("before", 0, 0)

    def arguments(self) -> Any:
        x = torch.cat([self.x[:, :1], self.x[:, 1:] * self.before], 1)
        x = acting(x, self.strike_before)
        return Box(x, -1, self.site) if self.boxed else x

    def step(self) -> None:
        """Runs a step, which has to add to existing gradients."""
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        self.grads = [self.grad_of(parameter) for parameter in self.parameters()]
        if self.recorded:
            with self.pipe.record():
                self.call()
        else:
            self.call()

    def call(self) -> None:
        self.pipe.forward_backward(
            self.arguments(),
            loss_fn=self.loss,
            schedule=self.schedule,
            reduction="sum",
            return_outputs=True,
        )

    def parameters(self) -> list[nn.Parameter]:
        return [self.before, *self.pipe.parameters()]

    def grad_of(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad

    def wrongs_afterwards(self) -> Iterator[str]:
        """Yields what is wrong after a failed step whose error was dropped."""
        for k, (parameter, grad) in enumerate(zip(self.parameters(), self.grads, strict=True)):
            if parameter.grad is not grad or not bool((grad == 3.0).all()):
                yield f"the failed step has changed gradient {k}: {parameter.grad}"
        yield from super().wrongs_afterwards()
        self.step()
        plain = nn.Sequential(*self.pipe)
        output = plain(self.arguments())
        expected = torch.autograd.grad(self.loss(output, None), self.parameters())
        for k, (parameter, grad) in enumerate(zip(self.parameters(), expected, strict=True)):
            if not torch.allclose(self.grad_of(parameter) - 3.0, grad, atol=1e-5):
                yield f"the next step makes {parameter.grad} of gradient {k}, not {grad}"
