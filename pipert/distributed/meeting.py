"""Rehearses a mini-batch of a new shape, to find which values cross the partition boundaries.

One micro-batch of each kind goes through all partitions but the last. Buffers are put back, and
layers draw the random numbers that they draw again in the mini-batch itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipert._typing import Tensors, Value
from pipert.distributed.agreement import Control
from pipert.distributed.boundary import Sample, sample_of
from pipert.distributed.stages import Running, entered, moved
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
            control.send(crossed[j + 1], homes[j + 1])
        elif j + 1 in running and j not in running:
            crossed[j + 1] = control.receive(home)
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
    with _buffers_kept(module), unsynchronized or nullcontext():
        module.forward_micro_batch = forward
        try:
            y = called()
        finally:
            module.forward_micro_batch = None
            reshard(module)
        if errors:
            raise errors.pop()
        return sample_of(y, handed_on)


def reshard(module: nn.Module) -> None:
    """Shard parameters again that a forward has gathered: only those of before have gradients."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Put back the buffers that ``module`` has; leave those that its layers make in the block."""
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
