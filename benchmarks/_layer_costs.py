"""The costs of a model's layers: measured seconds, and bytes counted from shapes.

Seconds are those of a layer by itself, forward and backward separately, on a copy as
``pipert.balance.layer_times`` uses it. Bytes come from one run of the model on the *meta* device,
where tensors have shapes but no data, so any size is possible. Both are for one sample
and assumed to grow in proportion to a micro-batch's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from _simulator import Transfer
from torch import Tensor, nn

from pipert.balance.probe import Probe, probe_layers
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.skip.routes import routes

__all__ = ["Bytes", "Times", "layer_bytes", "layer_times", "sum_by"]

Clock = Callable[[torch.device], float]


@dataclass(frozen=True)
class Times:
    """Seconds of each layer for one sample."""

    forward: list[float]
    backward: list[float]

    @property
    def total(self) -> list[float]:
        """Of forward and backward together."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class Bytes:
    """Bytes of each layer; all but the parameters for one sample."""

    parameters: list[int]
    inputs: list[int]
    """What a layer gets from the one before."""
    outputs: list[int]
    saved: list[dict[int, int]]
    """Of what it saves for the backward: the size of each storage, under a number that tells the
    storages of a model apart. Parameters are left out."""
    skips: list[Transfer]
    """From layer to layer."""

    def saved_by(self, layers: range) -> int:
        """Bytes that these layers keep between them, each storage counted once."""
        together: dict[int, int] = {}
        for k in layers:
            together.update(self.saved[k])
        return sum(together.values())


def layer_times(
    module: nn.Sequential,
    sample: Tensor,
    device: torch.device,
    rounds: int,
    progress: Callable[[], object],
    now: Clock | None = None,
) -> Times:
    """Median seconds of each layer over ``rounds``; ``progress`` is called after each layer.

    ``now`` reads the clock when what was asked of the device is done; by default that of the host.
    """

    def measure(probe: Probe) -> tuple[tuple[float, float], Carried]:
        _forward_and_backward(probe, now or _now)  # to warm up
        forward, backward, output = _forward_and_backward(probe, now or _now)
        progress()
        return (forward, backward), output

    found = [probe_layers(module, sample, device, measure) for _ in range(rounds)]
    layers = list(zip(*found, strict=True))
    forward, backward = (
        [median(times[way] for times in layer) / len(sample) for layer in layers] for way in (0, 1)
    )
    return Times(forward, backward)


def _forward_and_backward(probe: Probe, now: Clock) -> tuple[float, float, Carried]:
    probe.layer.zero_grad(set_to_none=True)
    inputs = probe.inputs()
    begin = now(probe.device)
    output = probe.forward(inputs)
    middle = now(probe.device)
    roots, _ = differentiable(output)
    grads = [torch.ones_like(root) for root in roots]
    between = now(probe.device)
    if roots:
        torch.autograd.backward(roots, grads)
    return middle - begin, now(probe.device) - between, output


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def layer_bytes(module: nn.Sequential, sample: Tensor) -> Bytes:
    """Of a module and one sample that are on the meta device."""
    numbers: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no two storages have one address
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: list[dict[int, int]] = []
    inputs, outputs = [], []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            alive.append(tensor.detach())
            number = numbers.setdefault(storage._cdata, len(numbers))
            saved[-1][number] = storage.nbytes()
        return tensor

    stashed: dict[int, int] = {}
    alone = routes([nn.Sequential(layer) for layer in module])
    value: object = sample
    for k, layer in enumerate(module):
        inputs.append(_bytes_of(value))
        if alone[k].leaving:
            stashed[k] = inputs[-1]  # the skips of these models are inputs, stashed as they are
        saved.append({})
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = layer(value)
        outputs.append(_bytes_of(value))
    skips = [
        Transfer(source, k, stashed[source])
        for k, of_layer in enumerate(alone)
        for _, source in of_layer.arriving
    ]
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in module]
    return Bytes(sizes, inputs, outputs, saved, skips)


def _bytes_of(value: object) -> int:
    """Of the tensors in a value, each storage once."""
    tensors, _ = tensors_of(value)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def sum_by(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    """The sum over the layers of each partition."""
    return [sum(costs[k] for k in layers) for layers in ranges(balance)]


def ranges(balance: Sequence[int]) -> list[range]:
    """The layers of each partition."""
    ends = [sum(balance[: j + 1]) for j in range(len(balance))]
    return [range(end - count, end) for end, count in zip(ends, balance, strict=True)]
