"""Holds what layers, blocks and partitions cost, and adds up the costs of consecutive ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from statistics import median, median_low
from typing import NamedTuple

Sizes = Mapping[int, int]
"""Bytes by a number of each storage, or tensor, so that what several layers share counts once."""


def total(sizes: Sizes) -> int:
    """Return the sum of the bytes."""
    return sum(sizes.values())


def without(sizes: Sizes, *others: Iterable[int]) -> dict[int, int]:
    """Return the sizes whose numbers are in none of the others."""
    known = set[int]().union(*others)
    return {key: size for key, size in sizes.items() if key not in known}


class Cost(NamedTuple):
    """Seconds and bytes of a layer, a block or a partition for one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    """Seconds of the backward with all gradients."""
    split: float = 0.0
    """Seconds of the backward when gradients of weights are deferred."""
    weight: float = 0.0
    """Seconds of the deferred gradients."""
    parameters: Sizes = {}
    """Parameters and buffers."""
    trained: Sizes = {}
    """Parameters that require grad."""
    deferred: int = 0
    """Bytes of the gradients that can be deferred."""
    inputs: Sizes = {}
    """Values from before: arguments, popped skips, and what the model's own code uses."""
    outputs: Sizes = {}
    """Values for later layers, stashed skips included."""
    saved: Sizes = {}
    """What the backward needs, without weights."""
    later: Sizes = {}
    """What stays from ``B`` to ``W`` for the deferred gradients."""
    kept: Sizes = {}
    """The part of ``saved`` that is not recomputed: of the model's own code, and of the loss."""
    forward_peak: int = 0
    """Bytes during the forward, inputs included."""
    layer_peak: int = 0
    """The same of its layer that needs most, alone: the rest is recomputed."""
    backward_peak: int = 0
    """Bytes during the backward, saved ones and gradients included."""
    split_peak: int = 0
    """The same, when gradients of weights are deferred."""
    kind: tuple[Hashable, ...] = ()
    """For each layer what those of the same class, with the same shapes, have in common."""

    @property
    def seconds(self) -> float:
        """The time of the forward and the backward."""
        return self.forward + self.backward


def _joined(a: Cost, b: Cost) -> Cost:
    arriving = without(b.inputs, a.outputs, a.inputs)  # waits while ``a`` runs; so do gradients
    beside = total(arriving)
    after, gradients = without(a.saved, b.saved), total(b.trained)
    left = gradients - b.deferred + total(without(b.later, a.saved))
    return Cost(
        a.forward + b.forward, a.backward + b.backward, a.split + b.split, a.weight + b.weight,
        {**a.parameters, **b.parameters}, {**a.trained, **b.trained}, a.deferred + b.deferred,
        {**a.inputs, **arriving}, {**a.outputs, **b.outputs}, {**a.saved, **b.saved},
        {**a.later, **b.later}, {**a.kept, **b.kept},
        max(a.forward_peak + beside, total(without(a.saved, b.inputs)) + b.forward_peak),
        max(a.layer_peak, b.layer_peak),
        max(total(after) + b.backward_peak, a.backward_peak + beside + gradients),
        max(total(after) + b.split_peak, a.split_peak + beside + left),
        a.kind + b.kind,
    )  # fmt: skip


def joined(costs: Sequence[Cost]) -> Cost:
    """Return the cost of consecutive layers, one or more."""
    forward, backward = reduce(_joined, costs), reduce(lambda b, a: _joined(a, b), costs[::-1])
    return backward._replace(forward_peak=forward.forward_peak)


_TIMES = "forward", "backward", "split", "weight"
_PEAKS = "forward_peak", "layer_peak", "backward_peak", "split_peak"
_NOISE = 0.25
"""A layer counts as slower than equal ones only if it is, by this share, in each round."""


def medians(rounds: Sequence[Sequence[Cost]]) -> list[Cost]:
    """Return the first round's costs with the median times of all; equal layers take as long."""
    costs, equal = list[Cost](), dict[Hashable, list[int]]()
    for each in zip(*rounds, strict=True):
        # Garbage that is freed meanwhile makes a peak look smaller.
        peaks = {name: max([getattr(cost, name) for cost in each]) for name in _PEAKS}
        costs.append(each[0]._replace(**peaks))
    for k, cost in enumerate(costs):
        equal.setdefault(cost.kind, []).append(k)
    for same, name in product(equal.values(), _TIMES):
        times = {k: [getattr(each[k], name) for each in rounds] for k in same}
        middle = median_low(map(median, times.values()))
        for k, own in times.items():
            is_equal = min(own) <= (1 + _NOISE) * middle and max(own) >= (1 - _NOISE) * middle
            costs[k] = costs[k]._replace(**{name: middle if is_equal else median(own)})
    return costs
