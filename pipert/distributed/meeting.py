"""Meeting a new shape: one micro-batch of each kind passes, to see what crosses the boundaries.

Buffers and random numbers stay as if it had not. The last partition computes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from pipert._typing import Tensors, Value
from pipert.distributed.agreement import Control
from pipert.distributed.boundary import Sample, sample_of
from pipert.distributed.stages import Running, entered, moved
from pipert.model.calls import unchanged
from pipert.stage.shared_memory import Shared, compute_watching

__all__: list[str] = []


def meet(
    control: Control, running: dict[int, Running], homes: Sequence[int], firsts: Sequence[int]
) -> dict[int, list[Sample]]:
    """Let a micro-batch of each kind pass.

    Partition by partition, after which all ranks agree: the layers of replicas talk to each other,
    so where one replica fails none goes on.

    Args:
        control: the ranks.
        running: this rank's partitions in the mini-batch.
        homes: the rank of each partition.
        firsts: the first micro-batch of each kind.

    Returns:
        By the partition that receives, as far as this rank sends or receives.

    Raises:
        RankError: a layer failed on another rank.
        Exception: a layer failed.
    """
    crossed: dict[int, bytes] = {}
    for j, home in enumerate(homes[:-1]):
        with control.agreeing():
            if j in running:
                arrived = _arriving(running[j], crossed.get(j), firsts)
                passed = [_rehearse(running[j], *one) for one in zip(firsts, *arrived, strict=True)]
                crossed[j + 1] = _saved(passed)
        if j in running and homes[j + 1] != home:
            control.send(crossed[j + 1], homes[j + 1])
        elif j + 1 in running and j not in running:
            crossed[j + 1] = control.receive(home)
    with control.agreeing():
        samples = {j: _loaded(found) for j, found in crossed.items()}
    return samples


def _saved(samples: list[Sample]) -> bytes:
    """As bytes; pickle alone would not bring back each dtype."""
    file = io.BytesIO()
    torch.save(samples, file)
    return file.getvalue()


def _loaded(crossed: bytes) -> list[Sample]:
    samples: list[Sample] = torch.load(io.BytesIO(crossed), weights_only=False)
    return samples


def _arriving(
    running: Running, crossed: bytes | None, firsts: Sequence[int]
) -> tuple[list[Value], list[Shared]]:
    """The inputs of a partition, and which of their tensors share memory."""
    device = running.place.device
    if crossed is None:  # layers may change their input, and get it again when all goes through
        xs = [moved(running.inputs[i], device, copy=True) for i in firsts]
        return xs, [{} for _ in firsts]
    samples = _loaded(crossed)
    return [entered(sample.on(device)) for sample in samples], [each.shared for each in samples]


def _rehearse(running: Running, i: int, x: Value, shared: Shared) -> Sample:
    """Compute one micro-batch of a partition, and return the value that leaves it."""
    module, called = running.module, running.called
    handed_on: Shared = {}
    errors: list[BaseException] = []

    def forward(_: Tensors) -> Value:
        run = running.batch.context.variables.copy().run
        try:
            compute = partial(running.compute, i, checkpointed=False)
            return run(compute_watching, shared, handed_on.update, compute, x)
        except BaseException as error:  # noqa: B036  raised when DDP has put away its own state
            errors.append(error)
            return None

    unsynchronized = called.no_sync() if isinstance(called, DistributedDataParallel) else None
    with unchanged(module), unsynchronized or nullcontext():
        module.forward_micro_batch = forward
        try:
            y = called()
        finally:
            module.forward_micro_batch = None
        if errors:
            raise errors.pop()
        return sample_of(y, handed_on)
