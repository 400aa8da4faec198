"""Refuses layers that spread their own calls over devices or processes, inside a pipe.

Around a pipe, or a model in one, ``DistributedDataParallel`` is right: it communicates once. So is
Opacus where a mini-batch is not split.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn

from pipert._torch import backward_hooks
from pipert.layers.modules import modules_of

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
