"""Tests skippable layers under torch's hooks, autocast, compile and functional calls."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipert.skip import pop, skippable, stash
from tests.helpers.pipes import pipe_of

Forward = Generator[Any, Any, Any]

MODES = ["always", "except_last", "never"]
modes = pytest.mark.parametrize("checkpoint", MODES)

same = torch.testing.assert_close
same(0, 0)  # the first call imports for half a second, which is no test's fault


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Forward:
        y = self.layer(x) * scale
        yield stash("a", y)
        return y.tanh()


@skippable(pop=["a"])
class PopAdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Forward:
        a = yield pop("a")
        return self.layer(x) * a


def model() -> nn.Sequential:
    return nn.Sequential(Stash(), nn.Linear(2, 2), PopAdd())


# Hooks --------------------------------------------------------------------------------------------


@modes
def test_a_hook_on_the_skip_itself_sees_its_gradient(checkpoint: str) -> None:
    seen: list[Tensor] = []

    @skippable(stash=["a"])
    class StashHooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Forward:
            skip = x * self.weight
            skip.register_hook(seen.append)  # type: ignore[no-untyped-call]
            yield stash("a", skip)
            return x

    last = PopAdd()
    with pipe_of(nn.Sequential(StashHooked(), nn.Identity(), last), checkpoint=checkpoint) as pipe:
        x = torch.randn(1, 2)
        pipe(x).sum().backward()
        same(seen, [last.layer(x)])


# torch.compile ------------------------------------------------------------------------------------


def each_layer(module: nn.Sequential) -> nn.Sequential:
    compiled: list[Any] = [torch.compile(layer, backend="eager") for layer in module]
    return nn.Sequential(*compiled)


def as_one_layer(module: nn.Sequential) -> nn.Sequential:
    compiled: Any = torch.compile(module, backend="eager")
    return nn.Sequential(compiled, nn.Identity())


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "compiled", [pytest.param(each_layer, marks=pytest.mark.sweep), as_one_layer]
)
def test_a_compiled_model_trains_as_the_plain_model(
    compiled: Callable[[nn.Sequential], nn.Sequential],
) -> None:
    plain = model()
    x = torch.randn(5, 2)
    expected = plain(x)
    grads = torch.autograd.grad(expected.sum(), list(plain.parameters()))
    with pipe_of(compiled(plain), chunks=2, checkpoint="except_last") as pipe:
        for _ in range(2):
            output = pipe(x)
            same(output, expected)
            same(torch.autograd.grad(output.sum(), list(plain.parameters())), grads)
