"""Models whose own code draws, and by that drops layers, skips cuts and chooses what to draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipert import pipeline
from pipert.layers.random_numbers import CPU, current_task
from tests.helpers.ways import CALL, MODES, Way, grads_of, same, take_step

SIZE, ROWS = 4, 8


class Draws:
    """Draws on the CPU, and notes whether the task has the generator to itself."""

    def __init__(self) -> None:
        self.in_turn: list[bool] = []

    def number(self) -> float:
        task = current_task()
        self.in_turn.append(task is not None and CPU in task._held)
        return float(torch.rand(()))

    def dropout(self, x: Tensor) -> Tensor:
        self.number()
        return F.dropout(x, 0.5)


class Layer(nn.Module):
    """A layer that may drop values, or choose by a number that it draws."""

    def __init__(self, kind: str, draws: Draws) -> None:
        super().__init__()
        self.linear, self.kind, self.draws = nn.Linear(SIZE, SIZE), kind, draws

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "drops":
            return self.draws.dropout(y)
        if self.kind == "chooses" and self.draws.number() < 0.5:
            return y + self.draws.dropout(x)
        return y


class Model(nn.Module):
    """A model whose ``forward`` is put together at random, with these steps before each layer."""

    STEPS = (
        "call", "call if drawn", "call if drawn", "call if positive", "call if nonzero",
        "drop values", "drop values if drawn", "call any", "call if an odd number is drawn",
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.draws, self.is_example = Draws(), True
        kinds = choose.choices(["plain", "drops", "chooses"], [4, 1, 1], k=6)
        self.layers = nn.ModuleList([Layer(kind, self.draws) for kind in kinds])
        self.steps = [choose.choice(self.STEPS) for _ in kinds]
        self.cuts = [f"layers.{k}" for k in sorted(choose.sample(range(1, 6), 2))]

    def forward(self, x: Tensor) -> Tensor:
        for layer, step in zip(self.layers, self.steps, strict=True):
            x = self.take(step, layer, x)
        return x

    def take(self, step: str, layer: nn.Module, x: Tensor) -> Tensor:
        if self.is_example:
            return layer(x)  # type: ignore[no-any-return]
        if step == "drop values" or step == "drop values if drawn" and self.draws.number() < 0.5:
            x = self.draws.dropout(x)
        elif step == "call any":
            return self.layers[int(self.draws.number() * 6)](x)  # type: ignore[no-any-return]
        is_called: Callable[[], bool] = {
            "call if drawn": lambda: self.draws.number() < 0.6,
            "call if positive": lambda: float(x.detach().sum()) > 0,
            "call if nonzero": lambda: float(x.detach()[0, 0]) != 0,
            "call if an odd number is drawn": lambda: int(torch.randint(8, ())) % 2 == 1,
        }.get(step, lambda: True)
        return layer(x) if is_called() else x * 1


def outcomes(model: Model, way: Way, devices: Sequence[str] = ("cpu",) * 3) -> list[Any]:
    """Takes each of three steps twice, from one seed; returns what they lead to."""
    x, found = torch.randn(ROWS, SIZE), []
    x[0] = 0
    options: Any = {"devices": list(devices), "chunks": 4, "checkpoint": way.checkpoint}
    pipe: Any = pipeline(model, model.cuts, example=x, **options)
    with pipe:
        model.is_example = False
        model.draws.in_turn.clear()
        for k in range(6):
            model.zero_grad()
            torch.manual_seed(k // 2)
            loss = take_step(pipe, way, x, target=x, loss_fn=_mse)
            found.append((loss, grads_of(model), torch.get_rng_state()))
    return found


def _mse(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target.to(y.device))


SCHEDULES = [CALL, "gpipe", "1f1b", "eager-1f1b", "zb-h1"]


@pytest.mark.filterwarnings("ignore:no partition begins at layer")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "seed", [*range(3), *[pytest.param(seed, marks=pytest.mark.sweep) for seed in range(3, 20)]]
)
def test_runs_of_one_seed_are_equal_whatever_is_drawn_and_skipped(
    seed: int, schedule: str, mode: str
) -> None:
    model = Model(seed)
    found = outcomes(model, Way(schedule, mode))
    same(found[1::2], found[::2], rtol=0, atol=0)
    assert all(model.draws.in_turn)
