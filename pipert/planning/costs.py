"""Measures the blocks of a model for micro-batches of several sizes, or counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from pipert._typing import Value
from pipert.balance.by_calls import find_blocks
from pipert.balance.by_cost import check_partitions
from pipert.balance.calls import Chain, as_arguments, in_chain, measure_calls, measuring_device
from pipert.balance.counted import counting
from pipert.balance.measure import Blocks, measure_all, medians, once_for_equal
from pipert.model.parameters import META
from pipert.model.split import is_sequential
from pipert.model.values import has_values

LossFn = Callable[..., Tensor] | None


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Count operations, and explain those that cannot be counted."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        raise ValueError(
            "operations under autocast cannot be counted; give the model the dtype in which it "
            "computes, model.bfloat16(), or devices to measure on"
        )
    with counting():
        try:
            yield
        except RuntimeError as error:
            error.add_note("operations are counted on meta; to measure, pass a list of devices")
            raise


def refuse_quantised(model: nn.Module) -> None:
    """Refuse to count plain weights for a model that will be loaded with quantised ones."""
    config = getattr(model, "config", None)
    if not has_values(model) and getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "the model's config has a quantization_config, but the model on meta has plain weights "
            "of other sizes; load it with device_map='auto', then plan"
        )


def blocks_of(
    model: nn.Module, loss_fn: LossFn, d: int, where: torch.device, first: Value,
    order: dict[str, set[str]],
) -> Callable[[Value, Value], Blocks]:
    """Find the blocks of a model for ``d`` devices: its layers if it is an ``nn.Sequential``, else
    those of the calls for a ``first`` micro-batch. ``order`` gets the layers, as they are called.

    Returns:
        What measures them for a micro-batch and its target.
    """
    measuring_device(where, model)  # refuses lazy layers
    layers, begins, chain = {"": model}, [""], [model]
    if is_sequential(model):
        layers = in_chain(model)
        begins, chain = [*layers], [*layers.values()]
        check_partitions(d, len(chain))
    elif d > 1 or not has_values(model):
        layers, begins = find_blocks(model, d, as_arguments(first), where, 2)

    def costs_for(value: Value, target: Value) -> Blocks:
        whole = Chain(chain, then=lambda y: y if loss_fn is None else loss_fn(y, target))

        def measure() -> Blocks:
            once = once_for_equal(measure_all)
            example = as_arguments(value)
            return measure_calls(
                whole, layers, begins, example, where, once, stays=target, upstream=order
            )

        return medians([measure() for _ in range(1 if where == META else 3)])

    return costs_for
