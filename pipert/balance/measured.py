"""Balances the layers of an ``nn.Sequential`` by their measured times or sizes."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost, check_partitions, minimise_longest_block
from pipert.balance.calls import measure_layers, micro_batches
from pipert.balance.measure import (
    Blocks,
    Cost,
    MeasuredCall,
    measure_sizes,
    once_for_equal,
    repeated,
    time_warm,
    total,
    without,
)
from pipert.model.split import check_module
from pipert.skip.store import Carried

__all__ = ["LayerSize", "balance_by_size", "balance_by_time", "layer_sizes", "layer_times"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    example: Value,
    *,
    chunks: int = 1,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Returns the balance that minimises the slowest partition's time, by measured layer times.

    A pipeline runs at the pace of its slowest partition (section 3 of the paper).

    >>> balance = balance_by_time(4, module, example, chunks=8)  # doctest: +SKIP
    >>> pipe = Pipe(module, balance, chunks=8)  # doctest: +SKIP

    Args:
        partitions: the number of devices.
        module, example, chunks, timeout, device: see :func:`layer_times`.

    Raises:
        ValueError, TypeError: as for :func:`layer_times` and :func:`balance_by_cost`.
    """
    check_module(module)
    check_partitions(partitions, len(module))
    times = layer_times(module, example, chunks=chunks, timeout=timeout, device=device)
    return balance_by_cost(times, partitions)


def layer_times(
    module: nn.Sequential,
    example: Value,
    *,
    chunks: int = 1,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[float]:
    """Measures how long each layer takes, forward and backward, in seconds.

    The measurement cycles through the layers, so that a disturbance affects all alike. Each round
    runs a layer once to warm up and once to time it; the result is the median over the rounds. Of
    layers of one class, settings and shapes the first is timed.
    Copies of the layers run, with the layers' forward hooks: the module, its gradients, buffers and
    mode, and torch's random state stay unchanged.

    >>> times = layer_times(module, example, timeout=0.1)
    >>> len(times) == len(module)
    True

    Args:
        module: on any device, in the mode to measure. May have skips, layers that work in place and
            any pytree between layers.
        example: a mini-batch, as large as those to train with: the first layer's input, on any
            device: any pytree, or :class:`Arguments` if it takes several.
        chunks: the number of micro-batches, as in :class:`pipert.Pipe`; the first is measured.
        timeout: seconds to spend. Each layer is measured once even if that takes longer.
        device: where to measure, one layer at a time. Default: the first CUDA device, or
            the CPU if there is none.

    Raises:
        TypeError: ``module`` is not a plain ``nn.Sequential``, or stashes and pops do not match.
        ValueError: ``timeout`` is negative, the device does not exist, or a layer has
            uninitialised lazy parameters.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    value = micro_batches(example, chunks)[0]

    def measure() -> Blocks:
        return measure_layers(module, value, device, once_for_equal(time_warm))

    return repeated(measure, timeout)


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
    crossing: int
    """What crosses a cut before it, once for each direction: the input, and each skip that is
    stashed before the cut and popped behind it, as a :class:`pipert.distributed.Pipe` sends them.
    In a :class:`pipert.Pipe` skips go straight to the partition that pops them."""


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    example: Value,
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

    >>> sum(balance_by_size(2, module, example, param_scale=4.0, device="meta"))
    4

    Args:
        partitions: the number of devices.
        module, example, chunks, device: see :func:`layer_sizes`.
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
    sizes = layer_sizes(module, example, chunks=chunks, device=device)
    m = len(micro_batches(example, chunks))
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
    module: nn.Sequential, example: Value, *, chunks: int = 1, device: Device | None = None
) -> list[LayerSize]:
    """Measures the memory that each layer needs, tensor by tensor.

    The result is nearly the same on any device; kernels of different devices may save different
    tensors, such as masks. Copies of the layers run, as in :func:`layer_times`.

    >>> layer_sizes(nn.Sequential(nn.Linear(8, 8)), example)[0].parameters  # float32
    288

    Args:
        module, example, chunks: see :func:`layer_times`.
        device: see there. On ``'meta'`` nothing is computed and no memory is needed.

    Raises:
        ValueError: ``chunks`` is below one.
        ValueError, TypeError, Exception: as for :func:`layer_times`.
    """
    popped = list[int]()

    def measure(call: MeasuredCall) -> tuple[Cost, Carried]:
        popped.append(total(call.storages.sizes(call.inputs.skips)))
        return measure_sizes(call)

    blocks = measure_layers(module, micro_batches(example, chunks)[0], device, measure)
    costs = [*blocks.values()]
    crossing, needed = list[int](), dict[int, int]()
    for cost in reversed(costs):
        needed = {**without(needed, cost.outputs), **cost.inputs}
        crossing.insert(0, total(needed))
    known, sizes = set[int](), list[LayerSize]()
    for cost, skips, crosses in zip(costs, popped, crossing, strict=True):
        own, trained = (total(without(each, known)) for each in (cost.parameters, cost.trained))
        known |= cost.parameters.keys()
        activations = total(without({**cost.saved, **cost.outputs}, cost.inputs))
        sizes.append(LayerSize(own, trained, activations, total(cost.inputs), skips, crosses))
    return sizes
