"""Balances layers by the memory they need."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipert._typing import Device, Value
from pipert.balance.blocks import minimise_longest_block
from pipert.balance.by_cost import check_partitions
from pipert.balance.probe import Probe, micro_batches, probe_layers
from pipert.batch.tensors import Carried, tensors_of
from pipert.model.settings import check_chunks
from pipert.model.split import check_module

__all__ = ["LayerSize", "balance_by_size", "layer_sizes"]


class LayerSize(NamedTuple):
    """The memory that a layer needs, in bytes."""

    parameters: int
    """Its parameters and buffers, except those already counted in an earlier layer."""
    trained: int
    """The part of ``parameters`` that requires grad."""
    activations: int
    """What its forward leaves behind: tensors saved for the backward, output, stashed values."""
    inputs: int
    """Its input, and the skips that it pops."""
    popped: int
    """The skips that it pops."""


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Returns the balance that minimises the largest partition's training memory.

    A partition holds its parameters with their gradients and the optimizer's state, the activations
    of one micro-batch, since the others are recomputed (section 3.2.4 of the paper), and for each
    micro-batch the inputs of that recomputation: the partition's input, and the skips that it pops.
    A popped skip counts as if it came from another partition.

    Args:
        partitions: the number of devices.
        module, sample, chunks, device: see :func:`layer_sizes`.
        param_scale: the memory of a parameter, its gradient and its optimizer state, relative to
            that of the parameter alone: 2 for SGD, 3 with momentum, 4 for Adam. Parameters that do
            not require grad, and buffers, count once.

    Returns:
        The number of layers in each partition.

    Raises:
        ValueError, TypeError: as for :func:`layer_sizes`; or there are more partitions than layers,
            or ``param_scale`` is below one.
    """
    check_module(module)
    n = check_partitions(partitions, len(module))
    if not 1 <= param_scale < math.inf:
        raise ValueError(f"param_scale must be 1 or more, and finite, got {param_scale!r}")
    sizes = layer_sizes(module, sample, chunks=chunks, device=device)
    m = len(micro_batches(sample, chunks))
    costs = [
        size.parameters
        + (param_scale - 1) * size.trained
        + size.activations
        + m * size.popped
        for size in sizes
    ]
    entries = [m * (size.inputs - size.popped) for size in sizes]
    return minimise_longest_block(costs, [1] * n, entries)


def layer_sizes(
    module: nn.Sequential, sample: Value, *, chunks: int = 1, device: Device | None = None
) -> list[LayerSize]:
    """Measures the memory that each layer needs, tensor by tensor.

    The result is nearly the same on any device; kernels of different devices may save different
    tensors, such as masks. Copies of the layers run, without hooks: the module, its gradients,
    buffers and mode, and torch's random state stay unchanged.

    Args:
        module: on any device. May have skips, layers that work in place and any pytree between
            layers.
        sample: the first layer's mini-batch, on any device: any pytree, or :class:`Arguments` if it
            takes several.
        chunks: the number of micro-batches. Activations are those of one.
        device: where to run the layers, one at a time. Default: the first CUDA device, or
            the CPU if there is none. On ``'meta'`` nothing is computed and no memory is needed.

    Raises:
        TypeError: ``module`` is not a plain ``nn.Sequential``, or stashes and pops do not match.
        ValueError: ``chunks`` is below one, the device does not exist, or a layer has
            uninitialised lazy parameters.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    first = micro_batches(sample, check_chunks(chunks))[0]
    measured = probe_layers(module, first, device, _measure)
    known: set[Tensor] = set()
    sizes = []
    for layer, size in zip(module, measured, strict=True):
        own = {*layer.parameters(), *layer.buffers()} - known
        known |= own
        trained = sum(t.nbytes for t in own if t.requires_grad)
        sizes.append(size._replace(parameters=sum(t.nbytes for t in own), trained=trained))
    return sizes


def _measure(probe: Probe) -> tuple[LayerSize, Carried]:
    inputs = probe.inputs()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return tensor

    arrived, popped = _storages(inputs), _storages(inputs.skips)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = probe.forward(inputs)
    existing = {*arrived, *_storages([*probe.layer.parameters(), *probe.layer.buffers()])}
    left = _storages((saved, output))
    activations = sum(size for storage, size in left.items() if storage not in existing)
    size = LayerSize(0, 0, activations, sum(arrived.values()), sum(popped.values()))
    return size, output


def _storages(value: Value) -> dict[int, int]:
    """Returns the bytes of each storage behind the tensors of ``value``."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(value)[0]]
    return {storage._cdata: storage.nbytes() for storage in storages}
