"""Measures the blocks of a model for each number of micro-batches."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.balance.by_calls import find_blocks
from pipert.balance.by_cost import check_partitions
from pipert.balance.calls import (
    as_arguments,
    measure_calls,
    measure_layers,
    measuring_device,
)
from pipert.balance.measure import (
    Cost,
    MeasuredCall,
    counting,
    joined,
    measure_all,
    medians,
    once_for_equal,
)
from pipert.batch.microbatch import Arguments
from pipert.batch.tensors import tensors_of
from pipert.model.split import check_module
from pipert.skip.store import Carried

LossFn = Callable[..., Tensor] | None
Blocks = dict[str, Cost]
"""The costs of blocks, by the name of the layer or module with which each begins."""
CostsFor = Callable[[Value, Value, str], Blocks]
"""Returns the costs of blocks for a micro-batch and its target; the text says what goes on."""


def costs_of_layers(model: Any, loss_fn: LossFn, d: int, where: torch.device) -> CostsFor:
    """Measure the layers of a Sequential for ``d`` devices; each is a block."""
    check_module(model)
    check_partitions(d, len(model))

    def costs_for(value: Value, target: Value, what: str) -> Blocks:
        named, last = [*model._modules.items()], len(model) - 1
        if loss_fn is not None:  # as a layer, which stays with the last one
            named.append(("loss_fn", _Loss(loss_fn, target)))
        layers = nn.Sequential(OrderedDict(named))
        with counting(what, _measure) as measured:
            costs = measure_layers(layers, value, where, once_for_equal(measured))
        return dict(zip(model._modules, [*costs[:last], joined(costs[last:])], strict=True))

    return costs_for


def costs_of_model(
    model: nn.Module, loss_fn: LossFn, d: int, where: torch.device, first: Arguments
) -> CostsFor:
    """Find the blocks of any other model with a ``first`` micro-batch, and measure them."""
    measuring_device(where, model)  # refuses parameters without values
    layers, begins = {"": model}, [""]
    if d > 1:
        layers, begins = find_blocks(model, d, first, where, 2)

    def costs_for(value: Value, target: Value, what: str) -> Blocks:
        loss = nn.Identity() if loss_fn is None else _Loss(loss_fn, target)

        with _without_caches(model), counting(what, _measure) as measured:
            once = once_for_equal(measured)
            rounds = [
                measure_calls(
                    model, {**layers, "loss_fn": loss} if loss_fn else layers, begins,
                    as_arguments(value), where, once, then=loss,
                )
                for _ in range(3)
            ]  # fmt: skip
        costs = medians([[*each.values()] for each in rounds])
        return dict(zip(rounds[0], costs, strict=True))

    return costs_for


def _measure(call: MeasuredCall) -> tuple[Cost, Carried]:
    cost, output = measure_all(call)
    if isinstance(call.original, _Loss):  # which is not recomputed
        # Its input is kept beside the one that is recomputed.
        kept = {-key if key in cost.inputs else key: size for key, size in cost.saved.items()}
        cost = cost._replace(kept=kept)
    return cost, output


@contextlib.contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Let models of transformers make no cache by default, as in a pipe that recomputes."""
    configs = [vars(module).get("config") for module in model.modules()]
    ones: list[Any] = [each for each in configs if getattr(each, "use_cache", None) is True]
    for config in ones:
        config.use_cache = False
    try:
        yield
    finally:
        for config in ones:
            config.use_cache = True


class _Loss(nn.Module):
    """The loss of a micro-batch, as a layer. What ``loss_fn`` belongs to is not copied with it."""

    def __init__(self, loss_fn: Callable[..., Tensor], target: Value) -> None:
        super().__init__()
        self._given = loss_fn, target
        for k, tensor in enumerate(tensors_of(target)[0]):  # which stay anyway
            self.register_buffer(f"target_{k}", tensor)

    def forward(self, y: Value) -> Tensor:
        loss_fn, target = self._given
        return loss_fn(y, target)

    def __deepcopy__(self, memo: object) -> _Loss:
        return _Loss(*self._given)
