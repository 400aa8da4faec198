"""Meeting a new shape: one micro-batch of each kind passes, to see what crosses the boundaries.

Buffers and random numbers stay as if it had not. The last partition computes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipert._typing import Tensors, Value
from pipert.distributed.agreement import Control
from pipert.distributed.boundary import Sample, sample_of
from pipert.distributed.stages import Running, entered, moved

__all__: list[str] = []


def meet(
    control: Control, running: dict[int, Running], homes: Sequence[int], kinds: Sequence[int]
) -> dict[int, list[Sample]]:
    """Let a micro-batch of each kind pass.

    Args:
        control: the ranks.
        running: this rank's partitions in the mini-batch.
        homes: the rank of each partition.
        kinds: the first micro-batch of each kind.

    Returns:
        By the partition that receives, as far as this rank sends or receives.

    Raises:
        RankError: a layer failed on another rank.
        Exception: a layer failed.
    """
    crossed: dict[int, list[Sample] | None] = {}
    errors: list[BaseException] = []
    for j, home in enumerate(homes[:-1]):
        if j in running:
            passed = None
            try:
                arrived = _arriving(running[j], crossed.get(j), kinds)
                if arrived is not None:
                    passed = [
                        _rehearse(running[j], i, x) for i, x in zip(kinds, arrived, strict=True)
                    ]
            except BaseException as error:  # noqa: B036  raised when all know
                errors.append(error)
            crossed[j + 1] = passed
            if homes[j + 1] != home:
                control.send(passed, homes[j + 1])
        elif j + 1 in running:
            crossed[j + 1] = control.receive(home)
    control.agree(None, errors.pop(0) if errors else None)
    return {j: samples for j, samples in crossed.items() if samples is not None}


def _arriving(
    running: Running, samples: list[Sample] | None, kinds: Sequence[int]
) -> list[Value] | None:
    if running.place.j == 0:
        return [moved(running.inputs[i], running.place.device) for i in kinds]
    return None if samples is None else [entered(one.on(running.place.device)) for one in samples]


class _Rehearsed(NamedTuple):
    running: Running
    i: int
    x: Value

    def forward(self, _: Tensors) -> Value:
        run = self.running.batch.context.variables.copy().run
        return run(self.running.compute, self.i, self.x, False)


def _rehearse(running: Running, i: int, x: Value) -> Sample:
    module, called = running.module, running.called
    unsynchronized = called.no_sync() if isinstance(called, DistributedDataParallel) else None
    with _buffers_kept(module), unsynchronized or contextlib.nullcontext():
        module.running = _Rehearsed(running, i, x)
        try:
            return sample_of(called())
        finally:
            module.running = None


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    before = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for home, name, buffer, value in before:
                home[name] = buffer
                buffer.copy_(value)
