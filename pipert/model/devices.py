"""Chooses the devices a pipe runs on, and the worker of each partition.

A CUDA device has one worker, however many partitions it holds, so tasks reach it in the clock's
order. Every ``cpu`` entry is a *logical device* with a worker of its own, so that
``['cpu', 'cpu']`` computes two partitions at once. ``'cpu:0'``, ``'cpu:1'`` and so on name logical
devices that may hold several partitions, as CUDA devices do.

Layers that spread their own calls over devices or processes are refused inside a pipe.

Around a pipe, or a model in one, ``DistributedDataParallel`` is right: it communicates once. So is
Opacus where a mini-batch is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pipert._torch import backward_hooks
from pipert._typing import Device
from pipert.layers.modules import modules_of
from pipert.workers.pool import assign_workers


def devices_and_workers(
    devices: Iterable[Device] | None, n: int
) -> tuple[list[torch.device], list[int]]:
    """Return the device and the worker of each of ``n`` partitions; refuse fewer devices, or more.

    Without ``devices`` these are the CUDA devices in order, or logical CPU devices.
    """
    found = default_devices(n) if devices is None else parse_devices(devices)
    names = [str(device) for device in found]
    if len(found) < n:
        again = f" (one may appear twice: devices={(names * n)[:n]})" if found else ""
        raise IndexError(
            f"each partition needs a device, but there are {n} partitions and the devices {names}; "
            f"make fewer partitions, or name {n} devices{again}"
        )
    if devices is not None and len(found) > n > 0:
        raise ValueError(
            f"each device needs a partition, but there are {n} partitions and the devices {names}; "
            f"make more partitions, or leave out {names[n:]}"
        )
    return where_tensors_are(found[:n]), assign_workers(found[:n])


def default_devices(partitions: int) -> list[torch.device]:
    """Return the CUDA devices in order or, without CUDA, one logical CPU device per partition."""
    if torch.cuda.is_available():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * partitions


def parse_devices(devices: Any) -> list[torch.device]:
    """Normalise ``devices``, and refuse those that this process cannot use.

    Logical CPU devices stay distinct, for :func:`assign_workers`; see :func:`where_tensors_are`.
    """
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable):
        meant = f"[{str(devices)!r}]"
        if not isinstance(devices, str | torch.device):
            meant = "['cpu', 'cpu'], or range(2) for two GPUs"
        raise TypeError(
            f"devices must be a sequence with one device for each partition, got {devices!r}; "
            f"write devices={meant}"
        )
    return [_parse(device) for device in devices]


def _parse(device: Device) -> torch.device:
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"devices are named 'cuda:0' or 'cpu', got {device!r}") from None
    if parsed.type == "cpu":
        return parsed
    if parsed.type != "cuda":
        raise ValueError(
            f"devices must be CPU or CUDA devices, got {parsed}; pipert does not know how to order "
            f"copies on {parsed.type!r}"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = parsed.index
    if index is None and count:
        index = torch.cuda.current_device()
    if index is None or index >= count:
        raise ValueError(
            f"devices names {parsed}, but {count} CUDA devices are available; name others, or "
            "leave devices out to use those available"
        )
    return torch.device("cuda", index)


def where_tensors_are(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the devices as torch knows them: all logical CPU devices are ``cpu``."""
    return [torch.device("cpu") if device.type == "cpu" else device for device in devices]


def refuse_other_devices(
    fn: Callable[[Tensor], Tensor], devices: Sequence[torch.device]
) -> None:
    """Refuse a function for ``nn.Module._apply`` that moves tensors away from their devices."""
    for device in set(devices):
        moved = fn(torch.empty(0, device=device)).device
        if moved != device:
            raise RuntimeError(
                f"the layers of a Pipe live on its devices {list(map(str, devices))} and cannot be "
                f"moved to {moved}; make a new Pipe of the module with other devices, or move the "
                "layers one by one after close()"
            )


_SHARDED = (
    "whose processes must gather its parameters in the same order; the concurrent workers of a "
    "pipe have none. Use FSDP alone, or pipert.distributed, which takes sharded partitions"
)
_REMEDIES = {
    "DataParallel": "which computes on the devices of other workers; put its .module in its place, "
    "for a pipe uses all devices by itself",
    "DistributedDataParallel": "whose processes must all communicate in the same order; the "
    "concurrent workers of a pipe have none. Put its .module in its place, and wrap the pipe, or "
    "the model that pipert.pipeline() has changed, in DistributedDataParallel",
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
}
"""By the name of a class, since other libraries have classes of these names, too."""


def refuse_data_parallel(module: nn.Module) -> None:
    """Refuse modules that are data- or tensor-parallel themselves, at any depth.

    Raises:
        TypeError: ``module`` is, or has in it, one of ``_REMEDIES``; or it has a DTensor.
    """
    for name, part in module.named_modules():
        for kind in type(part).__mro__:
            if remedy := _REMEDIES.get(kind.__name__):
                what = f"layer {name!r}" if name else "the model"
                raise TypeError(f"{what} is a {kind.__name__}, {remedy}")
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and mesh.size() > 1:
            raise TypeError(
                f"{name!r} is a DTensor over {mesh.size()} processes, which must all communicate "
                "in the same order; the concurrent workers of a pipe have none, even with "
                "chunks=1. Give each process whole parameters, or use pipert.distributed, with "
                "parallelize_module() in wrap="
            )


def refuse_gradients_of_rows(partitions: Iterable[nn.Module]) -> None:
    """Refuse weights that have gradients of single rows, in a run of several micro-batches.

    Opacus gives weights that attribute. Its hooks add up what comes before the optimizer, row by
    row of each micro-batch, so clipping would see sums of several rows, and privacy would be lost.

    Raises:
        RuntimeError: a weight has the attribute.
    """
    for part in chain.from_iterable(map(modules_of, partitions)):
        for weight in part._parameters.values() if any(backward_hooks(part)) else ():
            if hasattr(weight, "grad_sample"):
                raise RuntimeError(
                    "weights have a grad_sample, as Opacus computes it for each row of a batch, "
                    "and would get sums over the rows of several micro-batches; use chunks=1 with "
                    "checkpoint='never', or remove its hooks"
                )
