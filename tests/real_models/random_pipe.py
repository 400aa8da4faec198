"""Draws a pipe of a model, and a step in it, by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from torch import nn

from tests.real_models.real_model import ROWS

__all__ = ["SCHEDULES", "Calls", "RandomPipe", "called", "draw_pipe"]

IN_TURNS = ("cpu:0", "cpu:1", "cpu:0", "cpu:1")
AS_A_V = ("cpu:0", "cpu:1", "cpu:1", "cpu:0")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "call": (),
    "gpipe": (),
    "1f1b": (),
    "eager-1f1b": (),
    "interleaved": IN_TURNS,
    "zb": AS_A_V,
    "zb-h1": (),
    "zb-h2": (),
    "zb-v": AS_A_V,
}
"""A call with the caller's own backward, and each schedule of a step; the devices that it needs."""
CHECKPOINTS = ("never", "except_last", "always")

Calls = dict[str, tuple[str, ...]]
"""For each module, in the order of first calls, the modules that were being called then."""


@dataclass(frozen=True)
class RandomPipe:
    """A pipe and a step in it."""

    schedule: str
    cuts: tuple[str, ...]
    devices: tuple[str, ...]
    rows: int
    chunks: int
    checkpoint: tuple[str, ...]
    example: bool
    """Whether the pipe is made with an example."""
    inputs: bool
    """Whether floating-point arguments require grad."""
    frozen: tuple[str, ...]
    """The parameters that do not require grad."""


def draw_pipe(
    dice: Random, schedule: str, model: nn.Module, calls: Calls, recomputed: bool
) -> RandomPipe:
    """Draws a pipe of two to four partitions, and a step by ``schedule``."""
    needed = SCHEDULES[schedule]
    n = len(needed) or dice.randint(2, 4)
    modes = CHECKPOINTS if recomputed else ("never",)
    return RandomPipe(
        schedule,
        draw_cuts(dice, model, calls, n),
        needed or tuple(dice.choices(("cpu", "cpu:0"), k=n)),  # those with a number share a thread
        rows=dice.randint(5, ROWS),
        chunks=dice.randint(2, 4),
        checkpoint=tuple(dice.choices(modes, k=n)),
        example=dice.random() < 0.5,
        inputs=dice.random() < 0.5,
        frozen=draw_frozen(dice, [name for name, _ in model.named_parameters()]),
    )


def draw_cuts(dice: Random, model: nn.Module, calls: Calls, n: int) -> tuple[str, ...]:
    """Draws the cuts of ``n`` partitions, as often deep inside of the model as near its surface."""
    order = list(calls)
    while True:
        depth = dice.choice([1, 2, 3, 9])
        possible = [name for name in order if name and name.count(".") < depth]
        cuts = dice.sample(possible, min(n - 1, len(possible)))
        if len(cuts) == n - 1 and are_allowed(cuts, model, calls):
            return tuple(sorted(cuts, key=order.index))


def are_allowed(cuts: Sequence[str], model: nn.Module, calls: Calls) -> bool:
    """Tells whether a pipe takes these cuts.

    None may be inside another, or be called inside a layer, and partition 0 needs a layer.
    """
    modules = {model.get_submodule(name) for name in cuts}
    containers = {
        name
        for name, module in model.named_modules()
        if name in calls and not modules.isdisjoint({*module.modules()} - {module})
    }
    before_the_first = list(calls)[: min(map(list(calls).index, cuts))]
    return (
        containers.isdisjoint(cuts)
        and all(containers.issuperset(calls[name]) for name in cuts)
        and not containers.issuperset(before_the_first)
    )


def draw_frozen(dice: Random, names: Sequence[str]) -> tuple[str, ...]:
    """Draws no parameters, scattered ones, or the first ones."""
    kind = dice.choice(["none", "scattered", "first"])
    if kind == "scattered":
        return tuple([name for name in names if dice.random() < 0.4])
    return tuple(names[: dice.randrange(1, len(names))] if kind == "first" else ())


def called(model: nn.Module, batch: dict[str, Any]) -> Calls:
    """Calls a model, which keeps hooks, and notes the first call of each of its modules."""
    found: Calls = {}
    current: list[str] = []

    def begin(name: str, *_: Any) -> None:
        found.setdefault(name, tuple(current))
        current.append(name)

    def end(*_: Any) -> None:
        current.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(begin, name))
        module.register_forward_hook(end)
    model(**batch)
    return found
