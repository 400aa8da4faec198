"""Measures the blocks of a model for each number of micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.balance.by_calls import find_blocks
from pipert.balance.by_cost import check_partitions
from pipert.balance.calls import Chain, as_arguments, in_chain, measure_calls, measuring_device
from pipert.balance.measure import (
    Blocks,
    Cost,
    MeasuredCall,
    measure_all,
    medians,
    once_for_equal,
)
from pipert.batch.tensors import tensors_of
from pipert.model.split import is_sequential
from pipert.skip.store import Carried

LossFn = Callable[..., Tensor] | None
CostsFor = Callable[[Value, Value], Blocks]
"""Returns the costs of blocks for a micro-batch and its target."""


def blocks_of(
    model: nn.Module, loss_fn: LossFn, d: int, where: torch.device, first: Value
) -> CostsFor:
    """Find the blocks of a model for ``d`` devices: its layers if it is an ``nn.Sequential``, else
    those of the calls for a ``first`` micro-batch. Return what measures them."""
    measuring_device(where, model)  # refuses parameters without values
    layers, chain, names = {"": model}, [model], [""]
    if is_sequential(model):
        layers = in_chain(model)
        chain, names = [*layers.values()], [*layers]
        check_partitions(d, len(names))
    elif d > 1:
        layers, names = find_blocks(model, d, as_arguments(first), where, 2)

    def costs_for(value: Value, target: Value) -> Blocks:
        loss = {} if loss_fn is None else {".loss": _Loss(loss_fn, target)}
        whole, called = Chain([*chain, *loss.values()]), {**layers, **loss}

        def measure() -> Blocks:
            once = once_for_equal(_measure)
            return measure_calls(whole, called, names, as_arguments(value), where, once)

        with _without_caches(model):
            return medians([measure() for _ in range(3)])

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
