"""Balances layers by their measured times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost, check_partitions
from pipert.balance.probe import Probe, micro_batches, probe_layers
from pipert.batch.tensors import Carried, differentiable
from pipert.model.split import check_module

__all__ = ["balance_by_time", "layer_times"]

T = TypeVar("T")


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
    runs a layer once to warm up and once to time it; the result is the median over the rounds.
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
    return medians(lambda: probe_layers(module, value, device, _time), timeout)


def medians(measure: Callable[[], Iterable[float]], timeout: float) -> list[float]:
    """Calls ``measure``, once or more, for ``timeout`` seconds; returns medians of its times."""
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    deadline = perf_counter() + timeout
    rounds = [measure()]
    while perf_counter() < deadline:
        rounds.append(measure())
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _time(probe: Probe) -> tuple[float, Carried]:
    for _ in range(2):  # the first time to warm up
        timed = forward_and_backward(probe.forward, probe.inputs(), probe.layer, probe.device)
    return timed


def forward_and_backward(
    forward: Callable[[Any], T], inputs: Value, layer: nn.Module, device: torch.device
) -> tuple[float, T]:
    """Measures a forward, and a backward from ones to its inputs and parameters that need grad."""
    started = now(device)
    output = forward(inputs)
    seconds = now(device) - started
    roots, _ = differentiable(output)
    wanted = [*differentiable(inputs)[0], *[p for p in layer.parameters() if p.requires_grad]]
    if roots and wanted:
        ones = [torch.ones_like(root) for root in roots]
        started = now(device)
        # Only to these: a cache may lead to other layers, whose backward has already run.
        torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        seconds += now(device) - started
    return seconds, output


def now(device: torch.device) -> float:
    """Waits until the device is idle, then reads the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
