"""Measures, for each place where a model can be cut, the bytes that would cross there."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from pipert._typing import Device, Value
from pipert.balance.probe import Probe, micro_batches, probe_layers
from pipert.batch.tensors import Carried, tensors_of
from pipert.skip.namespace import Key

__all__ = ["crossing_sizes"]


class _LayerBytes(NamedTuple):
    """The bytes that a layer hands to later layers, and the skips that it pops."""

    output: int
    stashed: dict[Key, int]
    popped: tuple[Key, ...]


def crossing_sizes(
    module: nn.Sequential, sample: Value, *, device: Device | None = None
) -> list[int]:
    """Measures, for each layer, the bytes that cross to its partition if the cut is before it.

    These are the output of the layer before, and each skip that is stashed before the cut and
    popped behind it, as a :class:`pipert.distributed.Pipe` sends them; in a :class:`pipert.Pipe`
    skips go straight to the partition that pops them. The gradients of tensors that require grad
    take as many bytes again. Nothing crosses before the first layer.

    >>> times = layer_times(module, sample)  # doctest: +SKIP
    >>> crossing = [2 * b / 1e9 for b in crossing_sizes(module, sample)]  # doctest: +SKIP
    >>> balance = balance_by_cost(times, 2, crossing=crossing)  # doctest: +SKIP

    Args:
        module, device: see :func:`layer_sizes`.
        sample: the first layer's input, as large as one micro-batch, on any device: any pytree, or
            :class:`Arguments` if it takes several.

    Returns:
        The bytes before each layer, for ``balance_by_cost(crossing=...)``.

    Raises:
        ValueError, TypeError, Exception: as for :func:`layer_sizes`.
    """
    (value,) = micro_batches(sample, 1)
    layers = probe_layers(module, value, device, _measure)
    last_pop = {key: k for k, layer in enumerate(layers) for key in layer.popped}
    sizes = [0] * len(layers)
    for k, layer in enumerate(layers[:-1]):
        sizes[k + 1] += layer.output
        for key, size in layer.stashed.items():
            for cut in range(k + 1, last_pop[key] + 1):
                sizes[cut] += size
    return sizes


def _measure(probe: Probe) -> tuple[_LayerBytes, Carried]:
    output = probe.forward(probe.inputs())
    keys = [key for key, _ in probe.skips.leaving]
    stashed = {key: _bytes(value) for key, value in zip(keys, output.skips, strict=True)}
    popped = tuple([key for key, _ in probe.skips.arriving])
    return _LayerBytes(_bytes(output.value), stashed, popped), output


def _bytes(value: Value) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value)[0])
