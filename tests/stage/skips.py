"""Drives runs with a skip, whose tensors differ from others by their length."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from pipert.skip import pop, skippable, stash
from tests.skips import declaring
from tests.stage.graphs import inputs_of, scale
from tests.stages import Driven, FakeStream, FakeStreams

NAMES = {2: "x", 6: "skip"}  # a tensor's name in the log, by its length


class NamingStreams(FakeStreams):
    """Streams whose log also names the tensors of each copy."""

    def copy(
        self,
        tensors: tuple[Tensor, ...],
        device: torch.device,
        source: FakeStream,
        target: FakeStream,
        reader: object = None,
    ) -> tuple[Tensor, ...]:
        copied = super().copy(tensors, device, source, target, reader)
        self.log[-1] += f": {', '.join(NAMES[len(tensor)] for tensor in tensors)}"
        return copied

    def lines(self) -> list[str]:
        """Returns the log without repeated lines: each value of a task logs the same wait."""
        return [line for line, _ in groupby(self.log)]

    def copies(self) -> list[str]:
        return [line.removeprefix("copy ") for line in self.log if line.startswith("copy from")]


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that runs ``layer`` and stashes its output repeated to three times the length.

    With ``requires_grad=False`` the skip is detached.
    """

    def __init__(self, layer: nn.Module, requires_grad: bool = True) -> None:
        super().__init__()
        self.layer = layer
        self.requires_grad = requires_grad

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        y = self.layer(x)
        yield stash("skip", y.repeat(3) if self.requires_grad else y.detach().repeat(3))
        return y


@skippable(pop=["skip"])
class Pop(nn.Module):
    """A layer that applies ``layer`` to the sum of its input and a part of the skip."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
        skip = yield pop("skip")
        return self.layer(x + skip[:2])


def run_with_skip(
    fake: NamingStreams,
    devices: Sequence[torch.device],
    recomputed: int = 0,
    requires_grad: bool = True,
    pops: Iterable[int] = (),
) -> Driven:
    """Makes a run with a skip from the first partition to the last and to those in ``pops``."""
    layers = [fake.layer(j, device) for j, device in enumerate(devices)]
    poppers = {*pops, len(devices) - 1}
    layers[0] = declaring(Stash, stash={"skip": len(poppers)})(layers[0], requires_grad)
    for j in poppers:
        layers[j] = Pop(layers[j])
    return Driven([[layer] for layer in layers], [torch.ones(2)], devices, recomputed, fake)


def popped_in(through: nn.Module, m: int, **options: Any) -> list[Tensor]:
    """Returns the skips that the second of two partitions pops, one for each micro-batch.

    Its input x is the output of ``through``.
    """
    popped: list[Tensor] = []

    @skippable(pop=["skip"])
    class Keep(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Any]:
            popped.append((yield pop("skip")))
            return popped[-1] * 2

    Driven([[Stash(scale()), through], [Keep()]], inputs_of(m), **options).go()
    return popped
