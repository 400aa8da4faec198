"""Rehearses a mini-batch of a new shape, to find which values cross the partition boundaries.

One micro-batch of each kind goes through all partitions but the last. Buffers and the state of
random number generators are put back.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
    """Compute a micro-batch of each kind forward, one partition after the other.

    All ranks agree after each partition: layers of replicas may communicate, so if one replica
    fails, none goes on.

    Args:
        control: the ranks that agree.
        running: this rank's partitions in the mini-batch.
        homes: the rank of each partition.
        firsts: the first micro-batch of each kind.

    Returns:
        By receiving partition, a sample of each kind, for the boundaries at which this rank sends
        or receives.

    Raises:
        RankError: a layer failed on another rank.
        Exception: a layer failed.
    """
    crossed: dict[int, bytes] = {}
    for j, home in enumerate(homes[:-1]):
        with control.agreeing():
            if j in running:
                arrived = _arriving(running[j], crossed.get(j), firsts)
                left = [_rehearse(running[j], *one) for one in zip(firsts, *arrived, strict=True)]
                crossed[j + 1] = _saved(left)
        if j in running and homes[j + 1] != home:
            with control.talking():
                dist.send_object_list([crossed[j + 1]], homes[j + 1], group=control.group)
        elif j + 1 in running and j not in running:
            received: list[Any] = [None]
            with control.talking():
                dist.recv_object_list(received, home, group=control.group)
            (crossed[j + 1],) = received
    with control.agreeing():
        return {j: _loaded(saved) for j, saved in crossed.items()}


def _saved(samples: list[Sample]) -> bytes:
    """Serialise samples by ``torch.save``, since pickle alone does not restore every dtype."""
    file = io.BytesIO()
    torch.save(samples, file)
    return file.getvalue()


def _loaded(saved: bytes) -> list[Sample]:
    samples: list[Sample] = torch.load(io.BytesIO(saved), weights_only=False)
    return samples


def _arriving(
    running: Running, saved: bytes | None, firsts: Sequence[int]
) -> tuple[list[Value], list[Shared]]:
    """Return the inputs of a partition, and which of their tensors share memory."""
    device = running.place.device
    if saved is None:  # copies, since layers may change an input that the mini-batch uses again
        xs = [moved(running.inputs[i], device, copy=True) for i in firsts]
        return xs, [{} for _ in firsts]
    samples = _loaded(saved)
    return [entered(sample.on(device)) for sample in samples], [one.shared for one in samples]


def _rehearse(running: Running, i: int, x: Value, shared: Shared) -> Sample:
    """Compute micro-batch ``i`` of a partition; return a sample of the value that leaves it."""
    module, called = running.module, running.called
    handed_on: Shared = {}
    errors: list[BaseException] = []

    def forward(_: Tensors) -> Value:
        run = running.batch.context.variables.copy().run
        try:
            compute = partial(running.compute, i, checkpointed=False)
            return run(compute_watching, shared, handed_on.update, compute, x)
        except BaseException as error:  # noqa: B036  raised below, when DDP has left its forward
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
