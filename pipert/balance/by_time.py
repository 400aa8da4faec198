"""Balances layers by their measured times."""

from __future__ import annotations

from torch import nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost, check_partitions
from pipert.balance.calls import measure_layers, micro_batches
from pipert.balance.measure import repeated, time_warm
from pipert.model.split import check_module

__all__ = ["balance_by_time", "layer_times"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Returns the balance that minimises the slowest partition's time, by measured layer times.

    A pipeline runs at the pace of its slowest partition (section 3 of the paper).

    >>> pipe = Pipe(module, balance_by_time(4, module, sample), chunks=8)  # doctest: +SKIP

    Args:
        partitions: the number of devices.
        module, sample, timeout, device: see :func:`layer_times`.

    Returns:
        The number of layers in each partition.

    Raises:
        ValueError, TypeError: as for :func:`layer_times` and :func:`balance_by_cost`.
    """
    check_module(module)
    check_partitions(partitions, len(module))
    return balance_by_cost(layer_times(module, sample, timeout=timeout, device=device), partitions)


def layer_times(
    module: nn.Sequential, sample: Value, *, timeout: float = 1.0, device: Device | None = None
) -> list[float]:
    """Measures how long each layer takes, forward and backward, in seconds.

    The measurement cycles through the layers, so that a disturbance affects all alike. Each round
    runs a layer once to warm up and once to time it; the result is the median over the rounds, and
    over layers of the same class and shapes, unless one is slower or faster in each round.
    Copies of the layers run, with the layers' forward hooks: the module, its gradients, buffers and
    mode, and torch's random state stay unchanged.

    Args:
        module: on any device, in the mode to measure. May have skips, layers that work in place and
            any pytree between layers.
        sample: the first layer's input, on any device: any pytree, or :class:`Arguments` if it
            takes several. To time one micro-batch, it must be as large as one.
        timeout: seconds to spend. Each layer is measured once even if that takes longer.
        device: where to measure, one layer at a time. Default: the first CUDA device, or
            the CPU if there is none.

    Raises:
        TypeError: ``module`` is not a plain ``nn.Sequential``, or stashes and pops do not match.
        ValueError: ``timeout`` is negative, the device does not exist, or a layer has
            uninitialised lazy parameters.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    (value,) = micro_batches(sample, 1)
    return repeated(lambda: measure_layers(module, value, device, time_warm), timeout)
