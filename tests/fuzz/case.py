"""Describes a case as data: a model, its placement, and a user's steps with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["DEVICES", "Case", "Step", "draw"]

HOWS = {  # the ways to take a step, and their weights
    "call": 6, "gpipe": 3, "1f1b": 4, "zb-h1": 3, "zb-h2": 2, "interleaved": 3, "own order": 3,
    "two calls": 2,
    "two threads": 1,
    "twice": 1, "no_grad": 2, "inference": 2, "evaluation": 1,
}  # fmt: skip
UNITS = {  # groups of layers, and their weights; see layers.py
    "linear": 6, "linear, in place": 3, "linear, scale in place": 2, "tanh": 3, "scale": 3,
    "layer norm": 2, "dict": 2, "some cut": 2, "parameter": 2, "unused": 2, "detach": 1, "none": 2,
    "integers": 2, "ignores": 1, "lengths": 1, "pipe": 1, "batch norm": 1, "dropout": 1,
    "noise": 1, "fragile": 2, "function": 2,
}  # fmt: skip
DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cpu")


@dataclass(frozen=True)
class Step:
    """One step of a user."""

    how: str = "call"
    """A key of ``HOWS``."""
    rows: int = 4
    chunks: int = 2
    checkpoint: str = "except_last"
    training: bool = True
    x_on: str = "cuda:0"
    target_on: str = "cuda:0"
    wants: str = "nothing"
    """``'leaf'``: the input requires a gradient; ``'graph'``: it also comes from an operation."""
    streams: bool = False
    """Whether the user's current streams are not the default ones, on all devices."""
    current: int = 0
    """The user's current device."""
    recorded: bool = False
    fault: tuple[str, int] | None = None
    """The phase, ``'F'`` or ``'B'``, and the call in which the fragile layer fails."""
    scale_on: str | None = None
    """The device of the loss scale given to ``forward_backward``, if any."""
    counts: bool = False
    """Whether ``forward_backward`` gets a denominator, so that its loss is a mean."""
    loss_there: bool = False
    """Whether the loss of a call is computed on the target's device."""
    ready: bool = False
    """Whether ``forward_backward`` gets micro-batches that are ready, of different sizes."""
    function: bool = False
    """Whether a step of a model in place is a function that calls it."""
    late: bool = False
    """Whether the inputs are overwritten before the backward, if a plain GPU would allow that."""
    counted: bool = False
    """Whether it is counted how often each layer runs."""
    then: tuple[str, ...] = ()
    """The user's next actions: ``'refill'``, ``'step'``, ``'zero'``, ``'none'``, ``'drop'``."""


@dataclass(frozen=True)
class Case:
    """A model in a pipe, and steps. Indices wrap around, so that any numbers are valid."""

    seed: int = 0
    units: tuple[str, ...] = ("linear",)
    skips: tuple[tuple[int, int], ...] = ()
    """The units before which each skip is stashed and popped."""
    cuts: tuple[int, ...] = ()
    """The layers between which the model is cut."""
    devices: tuple[str, ...] = ("cuda:0",)
    """The devices of the partitions, used in turn."""
    tied: bool = False
    """Whether all Linears share one weight."""
    frozen: tuple[int, ...] = ()
    """The parameters that do not train."""
    hooked: tuple[int, ...] = ()
    """The parameters with a hook that changes their gradient."""
    deferred: bool = False
    several: bool = False
    """Whether the first layer takes several arguments, and the last one returns several values."""
    autocast: bool = False
    """Whether it runs in single precision under autocast to bfloat16."""
    in_place: bool = False
    """Whether the pipe is one of any model, if its forward can be that of an ``nn.Sequential``."""
    steps: tuple[Step, ...] = (Step(),)


def draw(seed: int, number: int, places: Sequence[str] = DEVICES, steps: int = 4) -> Case:
    """Draws the case of a number in the run of a seed.

    Args:
        seed: of the run.
        number: of the case.
        places: the devices for partitions, inputs and targets.
        steps: the largest number of steps.
    """
    dice = Random(f"{seed}-{number}")
    units = tuple(_weighted(dice, UNITS) for _ in range(dice.randint(1, 6)))
    n = dice.randint(1, 4)
    devices = tuple(dice.choice(places[: dice.choice([2, 4, 5])]) for _ in range(n))
    if dice.random() < 0.3 and len(places) > 2:  # partitions are placed on two devices in turn
        devices = tuple(dice.sample(places[:4], 2))
    return Case(
        seed=dice.randrange(1000),
        units=units,
        skips=tuple(
            (dice.randrange(9), dice.randrange(9)) for _ in range(dice.choice([0, 0, 1, 1, 2]))
        ),
        cuts=tuple(dice.randrange(12) for _ in range(n - 1)),
        devices=devices,
        tied=dice.random() < 0.35,
        frozen=_some(dice, 0.3),
        hooked=_some(dice, 0.2),
        deferred=dice.random() < 0.5,
        several=dice.random() < 0.25,
        autocast=dice.random() < 0.1,
        in_place=dice.random() < 0.3,
        steps=tuple(_step(dice, devices, places) for _ in range(dice.randint(1, steps))),
    )


def _step(dice: Random, devices: tuple[str, ...], places: Sequence[str]) -> Step:
    def place() -> str:
        return dice.choice([devices[0], *places])

    then = [what for what in ("refill", "step", "drop") if dice.random() < 0.6]
    then.insert(dice.randint(0, len(then)), dice.choice(["zero", "none", ""]))
    how, rows, chunks = _weighted(dice, HOWS), dice.randint(1, 8), dice.randint(1, 5)
    checkpoint = dice.choice(["always", "except_last", "never"])
    return Step(
        how=how,
        rows=rows,
        chunks=chunks,
        checkpoint=checkpoint,
        training=dice.random() < 0.8,
        x_on=place(),
        target_on=place(),
        wants=dice.choice(["nothing", "leaf", "graph"]),
        streams=dice.random() < 0.3,
        current=dice.choice([0, 0, 1, 3]),
        recorded=dice.random() < 0.1,
        fault=(dice.choice("FB"), dice.randrange(4)) if dice.random() < 0.15 else None,
        scale_on=place() if dice.random() < 0.2 else None,
        counts=dice.random() < 0.3,
        loss_there=dice.random() < 0.3,
        ready=dice.random() < 0.25,
        function=dice.random() < 0.5,
        late=dice.random() < 0.3,
        counted=dice.random() < 0.4,
        then=tuple(what for what in then if what),
    )


def _weighted(dice: Random, weights: dict[str, int]) -> str:
    return dice.choices(list(weights), list(weights.values()))[0]


def _some(dice: Random, chance: float) -> tuple[int, ...]:
    """Draws some of the first nine numbers; mostly none, seldom all that may exist."""
    if dice.random() > chance:
        return ()
    if dice.random() < 0.1:
        return tuple(range(50))
    return tuple(k for k in range(9) if dice.random() < 0.4)
