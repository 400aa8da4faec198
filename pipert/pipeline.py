"""``pipeline``: runs any ``nn.Module`` pipeline-parallel, without rewriting it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pipert._typing import Device
from pipert.any_model.routed import pipe_of
from pipert.balance.by_calls import choose_cuts
from pipert.model.device_map import cuts_of_device_map, has_device_map, remove_hooks
from pipert.pipes.base import PipeBase
from pipert.pipes.module_pipe import ModulePipe

__all__ = ["pipeline"]


def pipeline(
    model: nn.Module,
    cuts: Iterable[str] | None = None,
    *,
    partitions: int | None = None,
    example: Any = None,
    devices: Iterable[Device] | None = None,
    chunks: int = 1,
    checkpoint: str | Sequence[str] | None = None,
    deferred_batch_norm: bool | None = None,
    timeout: float | None = None,
) -> ModulePipe:
    """Make a pipe from any module, without rewriting it.

    The model's own ``forward`` runs once for each micro-batch. The calls of the modules where it is
    cut are intercepted, and what follows runs on the next device.

    >>> model = nn.ModuleDict({"a": a, "b": b})
    >>> model.forward = lambda x: model["b"](model["a"](x).relu())
    >>> with pipeline(model, cuts=["b"], devices=["cpu", "cpu"], chunks=4) as pipe:
    ...     pipe(torch.randn(32, 8)).shape
    torch.Size([32, 8])

    Args:
        model: the module. It moves to its devices, and stays the same object with the same
            parameters under the same names: ``pipe.module``. A pipe made of it before is closed.
        cuts: names of modules, as in ``model.named_modules()``, in the order in which they are
            called. Partition *j* begins with the first call of the *j*-th of them. Default: the
            cuts of the model's ``hf_device_map``, if it was loaded with one, or found by measuring.
        partitions: the number of partitions, instead of ``cuts``; ``example`` is run to find cuts
            for which each takes about as long. ``pipe.cuts`` tells which were chosen.
        example: arguments of the model, such as a micro-batch: a dict of keyword arguments, a tuple
            of positional ones, or a tensor.
        devices: as in :class:`Pipe`; with the cuts of an ``hf_device_map``, by default its devices.
        chunks: as in :class:`Pipe`.
        checkpoint: as in :class:`Pipe`. The calls of layers are recomputed; what the model's own
            code computes between them is kept.
        deferred_batch_norm: as in :class:`Pipe`.
        timeout: as in :class:`Pipe`.

    Raises:
        ValueError: as :class:`Pipe`; or a cut is not a module of the model, is inside another one,
            or can never be called; or neither cuts nor partitions are given.
        TypeError: ``model`` is not an ``nn.Module``, or has layers that stash and pop skips.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    if isinstance(model, PipeBase):
        raise TypeError("model is a pipe already; make another one of the module it was made of")
    mapped: Iterable[Device] | None = None  # the devices of the device map
    if cuts is None and partitions is None:
        if not has_device_map(model):
            raise ValueError(
                "give cuts, names of modules with which the partitions after the first begin; or "
                "partitions, their number, and example, arguments to measure the model with"
            )
        cuts, mapped = cuts_of_device_map(model)
    elif cuts is not None and partitions is not None:
        raise ValueError(f"give cuts or partitions, got both: {cuts!r} and {partitions!r}")
    while (older := pipe_of(model)) is not None and older.module is model:
        older.close()
    if has_device_map(model):
        remove_hooks(model)
    if cuts is None:
        assert partitions is not None
        if example is None:
            raise ValueError(
                "partitions are found by measuring the model; give example, arguments like those "
                "of a micro-batch"
            )
        cuts = choose_cuts(model, partitions, example)
    return ModulePipe(
        model,
        cuts,
        example,
        devices=mapped if devices is None else devices,
        chunks=chunks,
        checkpoint=checkpoint,
        deferred_batch_norm=deferred_batch_norm,
        timeout=timeout,
    )
