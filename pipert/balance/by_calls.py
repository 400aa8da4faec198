"""Chooses where to cut a model that is not a Sequential, by measured times.

The model need not name its lists of blocks: they are the outermost ``ModuleList``s (``_pp_plan`` of
transformers names the same ones), or its ``Sequential``s if it has none, or else its children.
Other modules with parameters, such as an embedding and a head, are candidates, too. A list inside
an element, such as one of experts, is no place to cut, unless the element takes more than a
partition's share. Then it is cut inside if it stands alone, as a backbone does. If it is one of
several of its class, it is a block and stays whole, but for a stage, which has a list of blocks of
its own. In any case the pieces are computed one from another: experts, which all get the input of
their block, are no places to cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost, check_partitions
from pipert.balance.calls import measure_calls, measuring_device
from pipert.balance.measure import Blocks, once_for_equal, repeated, time_once
from pipert.batch.microbatch import Arguments, arguments_of
from pipert.layers.compiling import is_compiled_itself
from pipert.model.cuts import is_called, layers_of

_LISTS = (nn.ModuleList, nn.Sequential)


def choose_cuts(
    model: nn.Module,
    partitions: int,
    example: Value,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[str]:
    """Returns the names of the modules at which to cut, so that the slowest partition is fastest.

    Measures for ``timeout`` seconds, after two forwards to warm up.

    Raises:
        ValueError: the model calls fewer candidates than there are partitions, or an argument is
            wrong, or a parameter has no value yet.
        Exception: whatever the model raises, with a note that names the layer.
    """
    n = check_partitions(partitions)
    where = measuring_device(device, model)
    if n == 1:
        return []
    arguments = arguments_of(example)

    layers, names = find_blocks(model, n, arguments, where)

    def measure() -> Blocks:
        return measure_calls(model, layers, names, arguments, where, once_for_equal(time_once))

    times = repeated(measure, timeout)
    return [names[k] for k in accumulate(balance_by_cost(times, n)[:-1])]


def find_blocks(
    model: nn.Module, n: int, example: Arguments, device: torch.device, each: int = 1
) -> tuple[dict[str, nn.Module], list[str]]:
    """Returns the layers of a model, and which ones begin a block, in the order of their calls.

    A block is what no cut divides. If it can, it takes no longer than a partition should, if each
    of ``n`` devices has so many.

    Raises:
        ValueError: there are less than ``n`` blocks, or the model is compiled.
    """
    if is_compiled_itself(model):
        raise ValueError(
            "the model is compiled or scripted as a whole, which calls its layers unseen; give the "
            "plain module, and compile its layers, layer.compile(), before it becomes a pipe"
        )

    def measure() -> tuple[Blocks, dict[str, set[str]]]:
        layers, upstream = layers_of(model, cuts), dict[str, set[str]]()
        begins = {name for name, layer in layers.items() if name in cuts or _has_parameters(layer)}
        once = once_for_equal(time_once)
        costs = measure_calls(model, layers, begins, example, device, once, upstream=upstream)
        return costs, upstream

    cuts, whole, split = set(_pieces(model, "")), set[str](), dict[str, set[str]]()
    if device.type != "meta":
        measure()  # to warm up: whatever runs first is slow
    while True:  # split blocks that take more than their share, where it can
        costs, upstream = measure()
        share = sum([cost.seconds for cost in costs.values()]) / (each * n)
        # A layer need not call its pieces: it may use their parameters and compute by itself.
        called = {name: [*filter(pieces.__contains__, costs)] for name, pieces in split.items()}
        useless = {
            name for name, pieces in called.items()
            if not pieces
            or any(upstream[piece].isdisjoint(pieces[:k]) for k, piece in enumerate(pieces) if k)
        }  # fmt: skip
        cuts = cuts.union(useless).difference(*(split[name] for name in useless))
        whole |= useless
        long = [name for name in costs if costs[name].seconds > share and name not in whole]
        split = {name: pieces for name in long if (pieces := set(_parts(model, name)))}
        if not split and not useless:
            break
        cuts = cuts.difference(split).union(*split.values())
    if len(costs) < n:
        raise ValueError(
            f"partitions must be at most {len(costs)}, got {n}: the example calls so many modules "
            f"at which the model can be cut, {[*costs]}; use fewer partitions, or pass cuts, or "
            "call eval() first if the model drops layers"
        )
    return layers_of(model, cuts), [*costs]


def _parts(model: nn.Module, name: str) -> list[str]:
    """Returns the names of the modules into which a long block is split: none if it is repeated.

    A repeated one that has a list of several modules of one class is a stage of blocks.
    """
    module = model.get_submodule(name)
    siblings = model.get_submodule(name.rpartition(".")[0])
    if isinstance(siblings, _LISTS) and _of_class(siblings, type(module)) > 1:
        inner = [part for part in (module, *module.children()) if isinstance(part, _LISTS)]
        if not any(len(part) == _of_class(part, type(part[0])) > 1 for part in inner if len(part)):
            return []
    return _pieces(model, name)


def _of_class(modules: nn.Module, kind: type[nn.Module]) -> int:
    return sum(type(child) is kind for child in modules.children())


def _pieces(model: nn.Module, name: str) -> list[str]:
    """Returns the names of the modules into which the one called ``name`` could be split."""
    known = {name for name, _ in model.named_modules()}  # a shared module's first name only
    module = model.get_submodule(name)
    if is_compiled_itself(module):
        return []
    found: list[str] = []
    for kind in _LISTS:
        found = found or [piece for piece in _elements(name, module, kind) if piece in known]
    return found or [piece for piece in _children(name, module) if piece in known]


def _elements(name: str, module: nn.Module, kind: type[nn.Module]) -> Iterator[str]:
    """Yields the elements of the outermost modules of ``kind`` in ``module``."""
    if isinstance(module, kind):
        yield from _children(name, module)
    elif not is_compiled_itself(module):
        for child_name, child in module.named_children():
            yield from _elements(f"{name}.{child_name}".lstrip("."), child, kind)


def _children(name: str, module: nn.Module) -> Iterator[str]:
    """Yields the children; a child that is never called is replaced by its own children."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}".lstrip(".")
        if is_called(child):
            yield path
        else:
            yield from _children(path, child)


def _has_parameters(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None
