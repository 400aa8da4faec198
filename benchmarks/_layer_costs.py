"""Determines the costs of a model's layers: measured seconds, and bytes counted from shapes.

Each layer is timed alone, forward and backward separately, on the kind of copy that
``pipert.balance.layer_times`` uses. Bytes come from one run of the model on the *meta* device,
where tensors have shapes but no data, so any size is possible. Both costs are for one sample
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

from pipert.balance.calls import measure_layers
from pipert.balance.measure import Call
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
        """Seconds of each layer's forward and backward together."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class Bytes:
    """Bytes of each layer; all but the parameters for one sample."""

    parameters: list[int]
    inputs: list[int]
    """The value that a layer receives from the previous one."""
    outputs: list[int]
    saved: list[dict[int, int]]
    """The sizes of the storages that a layer saves for the backward, without parameters, by a
    number that identifies the storage within the model."""
    skips: list[Transfer]
    """Transfers from layer to layer."""

    def saved_by(self, layers: range) -> int:
        """Returns the bytes that these layers save together, each storage counted once."""
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
    """Measures each layer's median seconds over ``rounds``; calls ``progress`` after each layer.

    ``now`` waits for the device and reads the clock; the default is the host's clock.
    """

    def measure(call: Call) -> tuple[tuple[float, float], Carried]:
        _forward_and_backward(call, now or _now)  # to warm up
        forward, backward, output = _forward_and_backward(call, now or _now)
        progress()
        return (forward, backward), output

    found = [measure_layers(module, sample, device, measure) for _ in range(rounds)]
    layers = list(zip(*found, strict=True))
    forward, backward = (
        [median(times[way] for times in layer) / len(sample) for layer in layers] for way in (0, 1)
    )
    return Times(forward, backward)


def _forward_and_backward(call: Call, now: Clock) -> tuple[float, float, Carried]:
    call.layer.zero_grad(set_to_none=True)
    inputs = call.fresh_inputs()
    begin = now(call.device)
    output = call.forward(inputs)
    middle = now(call.device)
    roots, _ = differentiable(output)
    grads = [torch.ones_like(root) for root in roots]
    between = now(call.device)
    if roots:
        torch.autograd.backward(roots, grads)
    return middle - begin, now(call.device) - between, output


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def layer_bytes(module: nn.Sequential, sample: Tensor) -> Bytes:
    """Counts the bytes of a module on the meta device, with one sample."""
    numbers: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is reused for a second storage
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
    """Returns the bytes of the tensors in a value, each storage counted once."""
    tensors, _ = tensors_of(value)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def sum_by(costs: Sequence[float], balance: Sequence[int]) -> list[float]:
    """Sums the layers' costs over each partition."""
    return [sum(costs[k] for k in layers) for layers in ranges(balance)]


def ranges(balance: Sequence[int]) -> list[range]:
    """Returns the indices of each partition's layers."""
    ends = [sum(balance[: j + 1]) for j in range(len(balance))]
    return [range(end - count, end) for end, count in zip(ends, balance, strict=True)]
