"""A step equals the plain module's for random models, balances and settings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipert import Pipe
from pipert.skip import pop, skippable, stash
from tests.fuzz.orders import Order
from tests.layers import Apply

pytestmark = pytest.mark.slow

same = torch.testing.assert_close


class Scale(nn.Module):
    """Multiplies by a parameter, in place where that is asked for."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(3, dtype=torch.float64) + 0.5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor) if self.in_place else x * self.factor


class Hands(Scale):
    """Hands its parameter on, beside what it makes with it."""

    def forward(self, x: Any) -> Any:
        return x * self.factor, self.factor, None, len(x)


@skippable(stash=["skip"])
class Stash(Scale):
    """A layer that stashes the product of its input and its parameter."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:  # type: ignore[override]
        yield stash("skip", (x * self.factor, self.factor))
        return x  # noqa: B901  what the decorator takes


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Adds what was put aside."""

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return x + skip[0] * skip[1]  # noqa: B901  what the decorator takes


def linear() -> nn.Module:
    return nn.Linear(3, 3, dtype=torch.float64)


# What an in-place layer changes must not be what the layer before it has saved.
UNITS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "linear, in place": lambda: [linear(), nn.ReLU(inplace=True)],
    "tanh": lambda: [nn.Tanh()],
    "scale": lambda: [Scale()],
    "linear, scale in place": lambda: [nn.Identity(), linear(), Scale(in_place=True)],
    "dict": lambda: [
        Apply(lambda x: {"x": x, "others": (x * 2, None, "twice")}),
        Apply(lambda value: value["x"] + value["others"][0]),
    ],
    "some cut": lambda: [
        Apply(lambda x: (x, x.detach(), x.argmax(1))),
        Apply(lambda value: value[0] * value[1] + value[2][:, None]),
    ],
    "parameter": lambda: [Hands(), Apply(lambda value: value[0] * value[1])],
    "unused": lambda: [Apply(lambda x: (x.exp(), x)), Apply(lambda value: value[1])],
    "detach": lambda: [Apply(torch.detach)],
}


@st.composite
def models(draw: st.DrawFn) -> nn.Sequential:
    """Layers in any order, a skip or none, shared parameters, some frozen, some with hooks."""
    names = draw(st.lists(st.sampled_from(sorted(UNITS)), min_size=1, max_size=5))
    units = [UNITS[name]() for name in names]
    if draw(st.booleans()):
        places = st.integers(0, len(units))
        first, last = sorted((draw(places), draw(places)))
        units = [*units[:first], [Stash()], *units[first:last], [Pop()], *units[last:]]
    model = nn.Sequential(*(layer for unit in units for layer in unit))
    linears = [layer for layer in model if isinstance(layer, nn.Linear)]
    if draw(st.booleans()):
        for layer in linears[1:]:
            layer.weight = linears[0].weight
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
    return model


any_order = st.builds(Order, seed=st.integers(0, 1 << 30), ordered=st.just(False))


@dataclass(frozen=True)
class Step:
    """The settings of a step, which may differ from those of the previous step."""

    rows: int
    chunks: int
    checkpoint: str
    schedule: Any
    kind: str
    """Of the loss: a mean over rows, a sum, or a sum and a count."""
    input_requires_grad: bool
    of_a_graph: bool
    """Whether the input, and what the loss uses for all micro-batches, come from operations."""


steps = st.builds(
    Step,
    rows=st.integers(1, 7),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    schedule=st.one_of(st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), any_order),
    kind=st.sampled_from(["mean", "sum", "counted"]),
    input_requires_grad=st.booleans(),
    of_a_graph=st.booleans(),
)


@st.composite
def balances(draw: st.DrawFn, layers: int) -> list[int]:
    """A composition of ``layers`` into up to four partitions."""
    cuts = draw(st.sets(st.integers(1, max(1, layers - 1)), max_size=3)) - {layers}
    ends = [0, *sorted(cuts), layers]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def loss_of(kind: str, always: Tensor, output: Tensor, target: Any) -> Any:
    """Depends on ``always``, so there is something to go backward through."""
    values, counts = target
    rows = (output * values).square().sum(1) * always
    if kind == "counted":
        return rows[counts].sum()
    return rows.mean() if kind == "mean" else rows.sum()


def outcome(step: Step, run: Callable[[Tensor, Any, Any], Tensor]) -> list[Any]:
    """Loss and gradients of a step that ``run`` does."""
    always = torch.ones((), dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-1, 1, 3 * step.rows, dtype=torch.float64).reshape(step.rows, 3)
    target = torch.linspace(1, 2, 3 * step.rows, dtype=torch.float64).reshape(step.rows, 3)
    counts = torch.arange(step.rows) % 3 != 1
    x.requires_grad_(step.input_requires_grad)
    given = x.exp() if step.of_a_graph else x * 1  # an in-place layer may not change a leaf
    used = always.exp().sin() if step.of_a_graph else always
    loss = run(given * 1, (target, counts), functools.partial(loss_of, step.kind, used))
    return [loss.detach(), x.grad, always.grad]


@settings(max_examples=80)
@given(model=models(), data=st.data(), several=st.lists(steps, min_size=1, max_size=3))
def test_every_step_is_the_plain_modules(
    model: nn.Sequential, data: st.DataObject, several: list[Step]
) -> None:
    balance = data.draw(balances(len(model)))
    plain = copy.deepcopy(model)
    hooked = data.draw(st.sets(st.integers(0, 9)))
    handed = {id(layer.factor) for layer in model if isinstance(layer, Hands | Stash)}
    for k, (one, other) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
        if k in hooked and one.requires_grad and id(one) not in handed:
            hooked_ones: Any = (one, other)
            for parameter in hooked_ones:
                parameter.register_hook(lambda grad: grad.clamp(max=0.3) * 2)

    def without(step: Step, x: Tensor, target: Any, loss_fn: Any) -> Tensor:
        loss: Any = loss_fn(plain(x), target)
        if step.kind == "counted":
            loss = loss / target[1].sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with Pipe(model, balance, devices=["cpu"] * len(balance)) as pipe:
        for step in several:
            pipe.chunks, pipe.checkpoint = step.chunks, step.checkpoint
            in_pipe = functools.partial(_in_pipe, pipe, step)
            same(outcome(step, in_pipe), outcome(step, functools.partial(without, step)))
            for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
                same(ours.grad, theirs.grad)


def _in_pipe(pipe: Pipe, step: Step, x: Tensor, target: Any, loss_fn: Any) -> Tensor:
    loss: Tensor = pipe.forward_backward(
        x, target=target, loss_fn=loss_fn, schedule=step.schedule,
        reduction="sum" if step.kind == "sum" else "mean",
        denominator=target[1].sum() if step.kind == "counted" else None,
    )  # fmt: skip
    return loss
