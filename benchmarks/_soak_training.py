"""Trains a model with tied weights, mapping inputs and losses with counts, for the soak.

Each step is compared with the plain module. Training with dropout that stops and resumes in a new
pipe gives the same result bit for bit.
"""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipert import Pipe

__all__ = ["Training"]

WIDTH, IGNORED = 8, -100
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", None)  # ``None``: a call, and ``loss.backward()``
BALANCES = ([2, 2, 2], [1, 3, 2], [3, 2, 1])  # first and last partition share the tied weight


class Enter(nn.Module):
    """A first layer that takes a mapping, or a tensor, which the soak passes when it is at rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch["x"] * batch["scale"]
        y: Tensor = self.linear(x)
        return y


def layers() -> nn.Sequential:
    """Builds six layers, the first and last of which share a weight."""
    first, last = Enter(), nn.Linear(WIDTH, WIDTH)
    last.weight = first.linear.weight
    middle = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, *middle, last)


def summed(y: Tensor, target: Tensor) -> Tensor:
    """Returns the sum of the losses of the targets that are not ignored."""
    return cross_entropy(y, target, ignore_index=IGNORED, reduction="sum")


class Training:
    """A pipe, its optimizer and the training steps of the soak."""

    def __init__(self, devices: Sequence[str], random: random.Random) -> None:
        self.devices = list(devices)
        self.random = random
        self.pipe = self._make(layers())
        self.optimizer = self._optimizer(self.pipe)

    def _make(self, module: nn.Sequential) -> Pipe:
        return Pipe(module, self.random.choice(BALANCES), devices=self.devices, chunks=3)

    @staticmethod
    def _optimizer(pipe: Pipe) -> torch.optim.Optimizer:
        return torch.optim.AdamW(pipe.parameters(), lr=1e-3)

    def batch(self) -> tuple[UserDict[str, Any], Tensor]:
        """Draws a mapping that is not a dict, and targets of which most may be ignored."""
        n, generator = self.random.randint(1, 12), torch.Generator()
        generator.manual_seed(self.random.randrange(1 << 30))
        x = torch.randn(n, WIDTH, generator=generator)
        target = torch.randint(WIDTH, (n,), generator=generator)
        target[self.random.randint(1, n) :] = IGNORED
        return UserDict(x=x, scale=x[:, :1].abs(), name="soak"), target

    def step(self) -> None:
        """Takes a step without dropout, and compares it with the plain module's."""
        plain = deepcopy(nn.Sequential(*self.pipe)).to("cpu").eval()
        self.pipe.chunks = self.random.randint(1, 5)
        self.pipe.checkpoint = self.random.choice(("always", "except_last", "never"))
        self.pipe.eval()
        batch, target = self.batch()
        loss = self._learn(self.pipe, batch, target, self.random.choice(SCHEDULES))
        expected = cross_entropy(plain(batch), target, ignore_index=IGNORED)
        expected.backward()  # type: ignore[no-untyped-call]
        ours = [loss, *(parameter.grad for parameter in self.pipe.parameters())]
        theirs = [expected.detach(), *(parameter.grad for parameter in plain.parameters())]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, check_device=False)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @staticmethod
    def _learn(
        pipe: Pipe, batch: UserDict[str, Any], target: Tensor, schedule: str | None
    ) -> Tensor:
        if schedule is not None:
            found: Tensor = pipe.forward_backward(
                batch, target=target, loss_fn=summed, denominator=(target != IGNORED).sum(),
                schedule=schedule,
            )  # fmt: skip
            return found
        y = pipe(batch)
        loss = cross_entropy(y, target.to(y.device), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def resume(self) -> None:
        """Trains, trains again in a new pipe from the state saved before, and compares the bits."""
        batches, schedule = [self.batch() for _ in range(3)], self.random.choice(SCHEDULES)
        seed, saved = self.random.randrange(1 << 30), deepcopy(self.pipe.state_dict())
        optimizer_state = deepcopy(self.optimizer.state_dict())
        first = self._train(batches, schedule, seed)
        old, self.pipe = self.pipe, Pipe(
            layers(), self.pipe.balance, devices=self.devices, chunks=self.pipe.chunks,
            checkpoint=self.pipe.checkpoint,
        )  # fmt: skip
        old.close()
        self.pipe.load_state_dict(saved)
        self.optimizer = self._optimizer(self.pipe)
        self.optimizer.load_state_dict(optimizer_state)
        again = self._train(batches, schedule, seed)
        assert all(map(torch.equal, first, again)), (schedule, self.pipe.checkpoint)

    def _train(
        self, batches: list[tuple[UserDict[str, Any], Tensor]], schedule: str | None, seed: int
    ) -> list[Tensor]:
        """Trains on the batches; returns all losses and the final weights."""
        self.pipe.train()
        torch.manual_seed(seed)
        losses = []
        for batch, target in batches:
            losses.append(self._learn(self.pipe, batch, target, schedule))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [*losses, *(weight.detach().clone() for weight in self.pipe.parameters())]
