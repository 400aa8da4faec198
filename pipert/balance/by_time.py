"""A balance from measured times."""

from __future__ import annotations

import statistics
from time import perf_counter

import torch
from torch import nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost, check_fits, check_partitions
from pipert.balance.probe import Probe, differentiable_outputs, micro_batches, probe_layers
from pipert.model.split import check_module
from pipert.skip.routes import Carried

__all__ = ["balance_by_time", "layer_times"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """The balance whose slowest partition is the fastest, by the measured times of the layers.

    Section 3 of the paper: a pipeline runs at the pace of its slowest partition.

    >>> pipe = Pipe(module, balance_by_time(4, module, sample), chunks=8)  # doctest: +SKIP

    Args:
        partitions: how many devices there are.
        module, sample, timeout, device: see :func:`layer_times`.

    Returns:
        How many layers each partition takes.

    Raises:
        ValueError, TypeError: as :func:`layer_times` and :func:`balance_by_cost`.
    """
    check_module(module)
    check_fits(check_partitions(partitions), len(module))
    return balance_by_cost(layer_times(module, sample, timeout=timeout, device=device), partitions)


def layer_times(
    module: nn.Sequential, sample: Value, *, timeout: float = 1.0, device: Device | None = None
) -> list[float]:
    """How long each layer takes, forward and backward, in seconds.

    The layers are gone through again and again, so that a disturbance hits all alike; each is run
    once to warm up and once more for its time, of which the median counts. What runs are copies
    without hooks: the module, its gradients, buffers and mode, and torch's random state are as
    before.

    Args:
        module: on any device, in the mode that it is to run in. Skips, layers that work in place
            and any pytree between layers are fine.
        sample: what the first layer gets: any pytree, or :class:`Arguments` where it takes several.
            Times are those of one micro-batch if the sample is as large as one. Any device.
        timeout: seconds to spend. All layers are measured once even if that takes longer.
        device: where to measure; one layer at a time is on it. Default: the first CUDA device, or
            the CPU if there is none.

    Raises:
        TypeError: ``module`` is no plain ``nn.Sequential``, or its stashes and pops do not match.
        ValueError: ``timeout`` is negative, the device is not there, or a layer has lazy parameters
            that are not initialised.
        Exception: whatever a layer raises, with a note that says which.
    """
    if not timeout >= 0:
        raise ValueError(f"timeout must be a number of seconds, 0 or more, got {timeout!r}")
    deadline = perf_counter() + timeout
    (value,) = micro_batches(sample, 1)
    rounds: list[list[float]] = []
    while not rounds or perf_counter() < deadline:
        rounds.append(probe_layers(module, value, device, _time))
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _time(probe: Probe) -> tuple[float, Carried]:
    _time_once(probe)
    return _time_once(probe)


def _time_once(probe: Probe) -> tuple[float, Carried]:
    probe.layer.zero_grad(set_to_none=True)
    inputs = probe.inputs()
    started = _now(probe.device)
    output = probe.forward(inputs)
    forward = _now(probe.device) - started
    roots, grads = differentiable_outputs(output)
    started = _now(probe.device)
    if roots:
        torch.autograd.backward(roots, grads)
    return forward + _now(probe.device) - started, output


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
