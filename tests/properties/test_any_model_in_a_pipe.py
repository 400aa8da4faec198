"""The equivalence contract for random models, balances, calls and failures."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipert import Pipe
from pipert.schedules.plan import plan_call
from pipert.skip import pop, skippable, stash

pytestmark = pytest.mark.slow

MODES = ["always", "except_last", "never"]
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

same = torch.testing.assert_close


class Apply(nn.Module):
    """A layer that calls a function with itself and its input."""

    def __init__(self, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions, and by the micro-batch's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.training else x


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes the product of its input and its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        yield stash("skip", x * self.factor)
        return x  # noqa: B901  what the decorator takes


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was put aside."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip  # noqa: B901  what the decorator takes


def linear() -> nn.Module:
    return nn.Linear(3, 3, dtype=torch.float64)


# What an in-place layer changes must not be what the layer before it has saved.
UNITS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "linear, in place": lambda: [linear(), nn.ReLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "norm": lambda: [nn.LayerNorm(3, dtype=torch.float64)],
    "scale": lambda: [Scale()],
    "dict": lambda: [
        Apply(lambda _, x: {"x": x, "others": (x * 2, None, "twice")}),
        Apply(lambda _, value: value["x"] + value["others"][0]),
    ],
    "detach": lambda: [Apply(lambda _, x: x.detach())],
}


@dataclass(frozen=True)
class Call:
    """The settings of a call, which may differ from those of the previous call."""

    rows: int
    chunks: int
    checkpoint: str
    training: bool
    context: str
    input_requires_grad: bool


calls = st.builds(
    Call,
    rows=st.integers(0, 7),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(MODES),
    training=st.booleans(),
    context=st.sampled_from(["grad", "grad", "grad", "no_grad", "inference"]),
    input_requires_grad=st.booleans(),
)


@st.composite
def models(draw: st.DrawFn) -> nn.Sequential:
    """Layers in any order, a skip or none, some parameters frozen."""
    names = draw(st.lists(st.sampled_from(sorted(UNITS)), min_size=1, max_size=5))
    units = [UNITS[name]() for name in names]
    if draw(st.booleans()):
        places = st.integers(0, len(units))
        first, last = sorted((draw(places), draw(places)))
        units = [*units[:first], [Stash()], *units[first:last], [Pop()], *units[last:]]
    model = nn.Sequential(*(layer for unit in units for layer in unit))
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 3)) > 0)
    return model


@st.composite
def balances(draw: st.DrawFn, layers: int) -> list[int]:
    """A composition of ``layers`` into up to four partitions."""
    cuts = draw(st.sets(st.integers(1, max(1, layers - 1)), max_size=3)) - {layers}
    ends = [0, *sorted(cuts), layers]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def step(module: nn.Module, call: Call) -> tuple[Tensor, Tensor | None]:
    """The output of one step, and the gradient of its input; parameters accumulate theirs."""
    module.train(call.training)
    x = torch.linspace(-1, 1, 3 * call.rows, dtype=torch.float64).reshape(call.rows, 3)
    x.requires_grad_(call.input_requires_grad)
    with CONTEXTS[call.context]():
        y = module(x * 1)  # an in-place layer may not change a leaf
    if y.requires_grad:
        y.backward(torch.linspace(1, 2, y.numel(), dtype=torch.float64).reshape(y.shape))
    assert isinstance(y, Tensor)
    return y, x.grad


@settings(max_examples=60)
@given(model=models(), data=st.data(), steps=st.lists(calls, min_size=1, max_size=3))
def test_every_step_of_a_pipe_is_the_plain_modules(
    model: nn.Sequential, data: st.DataObject, steps: list[Call]
) -> None:
    balance = data.draw(balances(len(model)))
    plain = copy.deepcopy(model)
    with Pipe(model, balance, devices=["cpu"] * len(balance)) as pipe:
        for call in steps:
            pipe.chunks, pipe.checkpoint = call.chunks, call.checkpoint
            expected, expected_grad = step(plain, call)
            y, grad = step(pipe, call)
            assert y.requires_grad == expected.requires_grad
            assert y.is_inference() == expected.is_inference()
            same(y, expected)
            same(grad, expected_grad)
            for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                same(ours.grad, theirs.grad)


class Fault(Exception):
    """Raised by a layer on demand."""


class Fragile(nn.Module):
    """Partition ``j``: raises for the micro-batches in ``faults``. A row holds its own number."""

    def __init__(self, j: int, faults: set[tuple[int, int]]) -> None:
        super().__init__()
        self.j = j
        self.faults = faults

    def forward(self, x: Tensor) -> Tensor:
        task = int(x[0, 0]), self.j
        if task in self.faults:
            raise Fault(task)
        return x


@settings(max_examples=40)
@given(m=st.integers(1, 6), n=st.integers(1, 4), data=st.data())
def test_the_first_of_any_failures_in_schedule_order_is_raised_and_the_next_call_is_right(
    m: int, n: int, data: st.DataObject
) -> None:
    tasks = [(i, j) for _, i, j in plan_call(m, n, range(n))]
    faults: set[tuple[int, int]] = set()
    layers = [Fragile(j, faults) for j in range(n)]
    x = torch.arange(float(m)).reshape(m, 1)
    with Pipe(nn.Sequential(*layers), [1] * n, devices=["cpu"] * n, chunks=m) as pipe:
        for _ in range(3):
            faults |= data.draw(st.sets(st.sampled_from(tasks), min_size=1, max_size=4))
            with pytest.raises(Fault) as raised:
                pipe(x)
            assert raised.value.args[0] == next(task for task in tasks if task in faults)
            faults.clear()
            assert torch.equal(pipe(x), x)
