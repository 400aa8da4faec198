"""``pipeline``: runs any ``nn.Module`` pipeline-parallel, without rewriting it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn

from pipert._typing import Device
from pipert.any_model.routed import pipe_of
from pipert.balance.by_calls import choose_cuts
from pipert.balance.by_cost import check_partitions
from pipert.balance.calls import as_arguments, micro_batches
from pipert.batch.microbatch import arguments_of
from pipert.model.calls import order_of_calls
from pipert.model.device_map import cuts_of_device_map, has_device_map, remove_hooks
from pipert.model.devices import default_devices, devices_and_workers, parse_devices
from pipert.model.parameters import Load
from pipert.pipes.base import PipeBase
from pipert.pipes.module_pipe import ModulePipe
from pipert.schedules.plan import Schedule

__all__ = ["pipeline"]


def pipeline(
    model: nn.Module,
    cuts: Iterable[str] | None = None,
    *,
    partitions: int | Literal["auto"] | None = None,
    example: Any = None,
    devices: Iterable[Device] | None = None,
    chunks: int = 1,
    checkpoint: str | Sequence[str] | None = None,
    schedule: str | Schedule = "1f1b",
    deferred_batch_norm: bool | None = None,
    timeout: float | None = None,
    load: Load | None = None,
) -> ModulePipe:
    """Make a pipe from any module, without rewriting it.

    The model's own ``forward`` runs once for each micro-batch. The calls of the modules where it is
    cut are intercepted, and what follows runs on the next device.

    >>> model = nn.ModuleDict({"a": a, "b": b})
    >>> model.forward = lambda x: model["b"](model["a"](x).relu())
    >>> with pipeline(model, example=torch.randn(32, 8), chunks=4) as pipe:
    ...     pipe(torch.randn(32, 8)).shape
    torch.Size([32, 8])

    Args:
        model: the module. It moves to its devices, and stays the same object with the same
            parameters under the same names: ``pipe.module``. A pipe made of it before is closed.
        cuts: names of modules, as in ``model.named_modules()``, in the order in which they are
            called. Partition *j* begins with the first call of the *j*-th of them. Default: the
            cuts of the model's ``hf_device_map``, if it was loaded with one, or found by measuring.
        partitions: the number of partitions, instead of ``cuts``: measuring ``example`` finds cuts
            after which each takes about as long; see ``pipe.cuts``. ``'auto'``, and the default
            without cuts, is the number of devices.
        example: a mini-batch, as large as those to train with: a dict of keyword arguments of the
            model, a tuple of positional ones, or a single one. It is split into ``chunks``, and the
            first micro-batch is run.
        devices: as in :class:`Pipe`; with the cuts of an ``hf_device_map``, by default its devices.
            Without CUDA, and without cuts, the default is two logical CPU devices.
        chunks: as in :class:`Pipe`.
        checkpoint: as in :class:`Pipe`. The calls of layers are recomputed; what the model's own
            code computes between them is kept.
        schedule: as in :class:`Pipe`.
        deferred_batch_norm: as in :class:`Pipe`.
        timeout: as in :class:`Pipe`.
        load: the values of parameters and buffers by their names, for a model that was built in
            :func:`empty_parameters`: a folder of safetensors files, such a file, or a function
            that returns the tensor of a name, ``None`` if it has none. Each goes straight to its
            device, one at a time. If one cannot be loaded, the model is as before.

    Raises:
        ValueError: as :class:`Pipe`; or a cut is not a module of the model, is inside another one,
            or can never be called; or neither cuts nor an example is given; or names or shapes of
            ``load`` do not fit the model.
        TypeError: ``model`` is not an ``nn.Module``, or has layers that stash and pop skips.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    if isinstance(model, PipeBase):
        raise TypeError("model is a pipe already; make another one of the module it was made of")
    if cuts is not None and partitions is not None:
        raise ValueError(f"give cuts or partitions, got both: {cuts!r} and {partitions!r}")
    if cuts is None and partitions is None and has_device_map(model):
        cuts, mapped = cuts_of_device_map(model)
        devices = mapped if devices is None else devices
    if cuts is None:
        is_auto = partitions in (None, "auto")
        n = 2 if is_auto else check_partitions(partitions)
        placed = default_devices(n) if devices is None else [*parse_devices(devices)]
        n = len(placed) if is_auto else n
        if example is None:
            raise ValueError(
                f"cuts for {n} partitions{', one for each device,' * is_auto} are found by running "
                "the model: give example, a mini-batch as for training, or cuts, the names of the "
                "modules with which the partitions after the first begin"
            )
        devices = None if devices is None else placed
        devices_and_workers(devices, n)  # refuses too few, before anything takes time
    if example is not None:
        example = as_arguments(micro_batches(arguments_of(example), chunks)[0])
    close_older(model)
    if cuts is None:
        cuts = choose_cuts(model, n, example)
    order_of = None if example is None else partial(order_of_calls, model, example)
    return ModulePipe(
        model,
        cuts,
        order_of,
        devices=devices,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        deferred_batch_norm=deferred_batch_norm,
        timeout=timeout,
        load=load,
    )


def close_older(model: nn.Module) -> None:
    """Close the pipe that was made of a model before, and remove hooks that spread it."""
    while (older := pipe_of(model)) is not None and older.module is model:
        older._runtime.pool.closed_by = " when another pipe of the model was made"
        older.close()
    if has_device_map(model):
        remove_hooks(model)
