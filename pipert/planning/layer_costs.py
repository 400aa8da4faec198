"""Measures what each layer costs for one micro-batch: seconds, and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipert._torch import identity
from pipert._typing import Device, Value
from pipert.autograd.engine import differentiate
from pipert.autograd.leaves import leaves_behind
from pipert.autograd.weight_gradients import Later, PutOff, compute_later
from pipert.balance.by_time import now
from pipert.balance.probe import Probe, probe_layers
from pipert.batch.tensors import Carried, differentiable, tensors_of
from pipert.skip.namespace import Key

__all__: list[str] = []


class LayerCost(NamedTuple):
    """What a layer costs for one micro-batch: seconds, and bytes."""

    forward: float
    backward: float
    """Without the gradients of weights that can be put off."""
    weight: float
    """For those gradients."""
    parameters: int
    """Of its parameters and buffers, except those of an earlier layer."""
    trained: int
    """Of those that require grad."""
    put_off: int
    """Of the gradients that can be put off."""
    given: int
    """Of its input."""
    made: int
    """Of its output, unless that is memory of the input."""
    saves_input: bool
    """Whether its backward needs its input."""
    saves_output: bool
    """Whether its backward needs its output."""
    saved: int
    """Of what it saves besides these, and of the skips that it stashes."""
    later: int
    """Of what is kept from ``B`` to ``W`` for the gradients that are put off."""
    arriving: int
    """The part of that which comes in the backward; the rest was saved in the forward."""
    stashed: dict[Key, int]
    """Of each skip that it stashes."""
    popped: list[Key]


def layer_costs(module: nn.Sequential, value: Value, device: Device | None) -> list[LayerCost]:
    """Measure each layer for the micro-batch ``value``, on copies, as :func:`.layer_times` does."""
    probe_layers(module, value, device, _measure)  # to warm up
    known, costs = set[Tensor](), list[LayerCost]()
    for layer, cost in zip(module, probe_layers(module, value, device, _measure), strict=True):
        own = {*layer.parameters(), *layer.buffers()} - known
        known |= own
        trained = sum(tensor.nbytes for tensor in own if tensor.requires_grad)
        parameters = sum(tensor.nbytes for tensor in own)
        costs.append(cost._replace(parameters=parameters, trained=trained))
    return costs


def _measure(probe: Probe) -> tuple[LayerCost, Carried]:
    sizes, output = _sizes(probe)
    inputs = probe.inputs()
    seconds = [now(probe.device)]
    again = probe.forward(inputs)
    seconds.append(now(probe.device))
    later = _go_back(inputs, again)
    seconds.append(now(probe.device))
    weights = _storages([*probe.layer.parameters(), *probe.layer.buffers()])
    kept = _storages([tensor for use in later for tensor in (use.x.tensor, use.dy.tensor)])
    arriving = _storages([use.dy.tensor for use in later])
    put_off = {id(leaf): leaf.nbytes for use in later for leaf in use.leaves}
    started = now(probe.device)
    compute_later(later)
    weight = now(probe.device) - started
    cost = LayerCost(
        forward=seconds[1] - seconds[0],
        backward=seconds[2] - seconds[1],
        weight=weight,
        parameters=0,
        trained=0,
        put_off=sum(put_off.values()),
        later=sum(size for key, size in kept.items() if key not in weights),
        arriving=sum(arriving.values()),
        **sizes,
    )
    return cost, output


def _sizes(probe: Probe) -> tuple[dict[str, Any], Carried]:
    """Return the sizes of what a forward leaves, and its output."""
    inputs, found = probe.inputs(), list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = probe.forward(inputs)
    saved = _storages(found)
    arrived, made = _storages(inputs), _storages(output.value)
    stashed = _storages(output.skips)
    known = {*arrived, *made, *_storages([*probe.layer.parameters(), *probe.layer.buffers()])}
    skips = zip(probe.skips.leaving, output.skips, strict=True)
    sizes = {
        "stashed": {key: sum(_storages(skip).values()) for (key, _), skip in skips},
        "popped": [key for key, _ in probe.skips.arriving],
        "given": sum(_storages(inputs.value).values()),
        "made": sum(size for key, size in made.items() if key not in arrived),
        "saves_input": not saved.keys().isdisjoint(arrived),
        "saves_output": not saved.keys().isdisjoint(made),
        "saved": sum(size for key, size in {**saved, **stashed}.items() if key not in known),
    }
    return sizes, output


def _go_back(inputs: Carried, output: Carried) -> list[Later]:
    """Differentiate a layer, except for what can be put off, which is returned."""
    roots, _ = differentiable(output)
    if not roots:
        return []
    edges = [get_gradient_edge(root) for root in roots]
    ends = [edge.node for edge in edges]
    put_off = PutOff(leaves_behind(ends), ends)
    wanted = [*differentiable(inputs)[0], *put_off.leaves]
    ones = [torch.ones_like(root) for root in roots]

    def run(wanted: Sequence[Any], ys: Sequence[Any], dys: Sequence[Tensor]) -> Any:
        return differentiate(ys, wanted, dys)

    _, later = put_off.differentiate(run, wanted, edges, ones)
    return later


def _storages(value: Value) -> dict[int, int]:
    """Return the bytes of each storage behind the tensors of ``value``."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(value)[0]]
    return {identity(storage): storage.nbytes() for storage in storages}
