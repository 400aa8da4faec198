"""Searches for the fastest step that fits the memory of the devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipert._torch import NormBase
from pipert._typing import Device, Value
from pipert.balance.by_calls import find_blocks
from pipert.balance.by_cost import balance_by_cost, check_partitions
from pipert.balance.by_time import now
from pipert.balance.probe import as_arguments, copied, measuring_device, micro_batches
from pipert.batch.microbatch import arguments_of
from pipert.batch.tensors import tensors_of
from pipert.model.calls import settled
from pipert.model.devices import parse_devices, where_tensors_are
from pipert.model.settings import check_chunks
from pipert.model.split import check_module, is_sequential
from pipert.planning.candidate import Candidate, Candidates, Memory, limits_of, text_of
from pipert.planning.layer_costs import LayerCost, block_costs, layer_costs
from pipert.planning.memory import PartitionCost, peaks
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan, plan, recomputed_in_each
from pipert.schedules.simulate import simulate

__all__ = ["plan_for"]

LossFn = Callable[..., Tensor] | None


def plan_for(
    model: nn.Module,
    example: Value,
    *,
    memory: Memory | Sequence[Memory],
    loss_fn: Callable[..., Tensor] | None = None,
    target: Value = None,
    devices: Iterable[Device] | None = None,
    chunks: Sequence[int] | None = None,
    param_scale: float = 2.0,
    best: int = 5,
) -> Candidates:
    """Find the fastest steps that fit the memory of the devices.

    ::

        print(pipert.plan_for(module, x, target=y, loss_fn=loss_fn, memory="20GiB"))

    Each layer is measured for each number of chunks, on a copy, so the model need not fit on one
    device. Then balances, schedules and the checkpoint of each partition are tried in a simulation,
    which takes seconds. On a GPU the peak statistics of memory are reset.

    Args:
        model: an ``nn.Sequential`` for :class:`Pipe`, or any module for :func:`pipeline`, whose own
            forward runs; it stays unchanged.
        example: a mini-batch, as large as those to train with: the first layer's input, or
            arguments of the model as in :func:`pipeline`.
        memory: how much each device may use: bytes, or a text such as ``'20GiB'``; or one for each
            device. Leave some for workspaces and fragmentation, which are not predicted.
        loss_fn, target: as in :meth:`Pipe.forward_backward`; the loss is measured as a part of the
            last partition. Default: it costs nothing, unless the model computes it.
        devices: the devices to use, each once, or ``'cpu'`` for each logical CPU device; layers are
            measured on the first. Default: the CUDA devices in order, or one CPU.
        chunks: the numbers of micro-batches to try. Default: one, two, four and eight times the
            number of devices, as far as there are rows, two of each if there are statistics.
        param_scale: the memory of a trained parameter with its gradient and the optimizer's state,
            relative to that of the parameter alone: 2 for SGD, 3 with momentum, 4 for Adam.
        best: how many candidates to return, at most.

    Returns:
        The candidates that fit, the fastest first.

    Raises:
        ValueError: nothing fits; the message says what is missing. Or an argument is wrong, or
            there are more devices than layers or blocks.
        TypeError: ``model`` is a pipe already, or a Sequential that :class:`Pipe` refuses.
        RuntimeError: a layer changes an argument, such as a cache, and could not be recomputed.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    if param_scale < 2:
        raise ValueError(f"param_scale is 2 with gradients alone, or more, got {param_scale}")
    if best < 1:
        raise ValueError(f"best must be 1 or more, got {best}")
    names = _names(devices)
    where = where_tensors_are(parse_devices(names))
    limits = limits_of(memory, len(names))
    if isinstance(loss_fn, nn.Module):  # with class weights, perhaps
        loss_fn = copied(loss_fn, where[0])
    prepare = _of_layers
    if not is_sequential(model):
        prepare, example = _of_model, arguments_of(example)
    costs_for, begins = prepare(model, example, loss_fn, target, len(names), where[0])
    rows = min([len(tensor) for tensor in tensors_of(example)[0] if tensor.dim()], default=1)
    if any(isinstance(module, NormBase) and module.training for module in model.modules()):
        rows //= 2  # statistics need two
    tried = chunks or [k * len(names) for k in (1, 2, 4, 8) if k * len(names) <= rows] or [1]
    # Several numbers of chunks may make the same micro-batches.
    different = {len(micro_batches(example, m)): m for m in map(check_chunks, tried)}
    sizes = [sum(tensor.nbytes for tensor in tensors_of(x)[0]) for x in (example, target)]
    search = _Search(names, where, begins, param_scale, sizes)
    found = [each for m in different for each in search.candidates(costs_for(m), m)]
    fit = [each for each in found if all(a <= b for a, b in zip(each.peaks, limits, strict=True))]
    if not fit:
        raise ValueError(_what_is_missing(found, limits, names))
    fastest = sorted(fit, key=lambda each: (round(each.seconds, 9), sum(each.peaks)))
    return Candidates(fastest[:best])


_Measured = tuple[Callable[[int], list[list[LayerCost]]], list[str] | None]
"""A function that returns the costs of blocks for a number of micro-batches; and the names of the
modules with which the blocks begin, if they are no layers."""


def _of_layers(
    model: Any, example: Value, loss_fn: LossFn, target: Value, d: int, where: torch.device
) -> _Measured:
    check_module(model)
    check_partitions(d, len(model))

    def costs_for(m: int) -> list[list[LayerCost]]:
        value = micro_batches(example, m)[0]
        if loss_fn is None:
            return [[cost] for cost in layer_costs(model, value, where)]
        # As a layer, which stays with the last one.
        named = [*model._modules.items(), ("loss_fn", _Loss(loss_fn, _first(target, m, where)))]
        *layers, last = layer_costs(nn.Sequential(OrderedDict(named)), value, where)
        return [*([cost] for cost in layers[:-1]), [layers[-1], last]]

    return costs_for, None


def _of_model(
    model: nn.Module, example: Value, loss_fn: LossFn, target: Value, d: int, where: torch.device
) -> _Measured:
    measuring_device(where, model)  # refuses parameters without values
    layers, begins = {"": model}, [""]
    if d > 1:
        first = as_arguments(micro_batches(example, d)[0])
        layers, begins = find_blocks(model, d, first, where, 2)

    def costs_for(m: int) -> list[list[LayerCost]]:
        value, aim = as_arguments(micro_batches(example, m)[0]), _first(target, m, where)

        def loss(output: Value) -> Value:
            return output if loss_fn is None else loss_fn(output, aim)

        return block_costs(model, layers, begins, value, where, loss)

    return costs_for, begins


def _first(target: Value, m: int, where: torch.device) -> Value:
    """Return the target of the first micro-batch."""
    return None if target is None else settled(micro_batches(target, m)[0], where)


def _names(devices: Iterable[Device] | None) -> list[str]:
    """Return each device's name; logical CPU devices get a number, as they may be named twice."""
    if devices is None:
        return [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu:0"]
    parsed = map(str, parse_devices(devices))
    names = [f"cpu:{k}" if name == "cpu" else name for k, name in enumerate(parsed)]
    if not names:
        raise ValueError("devices must name one device or more, got none")
    if len(set(names)) < len(names):
        raise ValueError(f"each device is named once, got {names}")
    return names


class _Loss(nn.Module):
    """The loss of a micro-batch, as a layer. What ``loss_fn`` belongs to is not copied with it."""

    def __init__(self, loss_fn: Callable[..., Tensor], target: Value) -> None:
        super().__init__()
        self._given = loss_fn, target

    def forward(self, y: Value) -> Tensor:
        loss_fn, target = self._given
        return loss_fn(y, target)

    def __deepcopy__(self, memo: object) -> _Loss:
        return self


class _Search(NamedTuple):
    """What all candidates have in common."""

    names: list[str]
    where: list[torch.device]
    begins: list[str] | None
    """The modules with which blocks begin, if they are no layers."""
    scale: float
    sizes: list[int]
    """The bytes of the mini-batch, and of the targets."""

    def candidates(self, blocks: Sequence[Sequence[LayerCost]], m: int) -> Iterator[Candidate]:
        """Yield all ways to divide the blocks and run ``m`` micro-batches."""
        d = len(self.names)
        ways: list[tuple[list[int], tuple[str, ...]]] = [([*range(d)], _STRAIGHT)]
        if d > 1:
            ways += [([*range(d)] * 2, ("interleaved",))]
            ways += [([*range(d), *reversed(range(d))], ("zb-v",))]
        seconds = [sum(cost.forward + cost.backward for cost in block) for block in blocks]
        for placement, schedules in ways:
            n = len(placement)
            if n > len(blocks):
                continue
            balance = balance_by_cost(seconds, n)
            ends = [0, *accumulate(balance)]
            parts = [PartitionCost.of([*chain(*blocks[a:b])]) for a, b in pairwise(ends)]
            cuts = None if self.begins is None else tuple([self.begins[k] for k in ends[1:-1]])
            copying = _copy_times(parts, placement, self.where)
            devices = tuple([self.names[k] for k in placement])
            for schedule, modes in product(schedules, _modes(n)):
                made = plan(schedule, m, n, placement, recomputed_in_each(modes, m, n))
                yield Candidate(
                    tuple(balance),
                    cuts,
                    devices,
                    m,
                    modes[0] if len(set(modes)) == 1 else modes,
                    schedule,
                    _seconds(made, parts, copying),
                    tuple(peaks(made, parts, self.scale, *self.sizes)),
                )


_STRAIGHT = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2")


def _modes(n: int) -> Iterator[tuple[str, ...]]:
    """Yield modes of partitions: the first ones keep most, so they are recomputed first."""
    for k in range(n + 1):
        yield ("always",) * k + ("never",) * (n - k)


def _seconds(
    made: Plan, parts: Sequence[PartitionCost], copying: Callable[[int, int], float]
) -> float:
    puts_off = WEIGHT in made.occurring_kinds

    def seconds(action: Action) -> float:
        part = parts[action.j]
        if action.kind in (FORWARD, RECOMPUTE):
            return part.forward
        if action.kind == BACKWARD:
            return part.split if puts_off else part.backward
        return part.weight

    return max(end for _, end in simulate(made, seconds, copying).values())


def _copy_times(
    parts: Sequence[PartitionCost], placement: Sequence[int], where: Sequence[torch.device]
) -> Callable[[int, int], float]:
    """Return the measured times of copies between partitions, forward and backward."""
    times = dict[tuple[int, int], float]()
    for j in range(len(parts) - 1):
        source, target = where[placement[j]], where[placement[j + 1]]
        seconds = 0.0
        if source != target:
            sent = torch.empty(parts[j + 1].given, dtype=torch.uint8, device=source)
            for _ in range(2):  # the first time to warm up
                now(source)
                begin = now(target)
                sent.to(target)
                seconds = now(target) - begin
        times[j, j + 1] = times[j + 1, j] = seconds
    return lambda j, to: times[j, to]


def _what_is_missing(
    found: Sequence[Candidate], limits: Sequence[int], names: Sequence[str]
) -> str:
    def excess(each: Candidate) -> int:
        return max(peak - limit for peak, limit in zip(each.peaks, limits, strict=True))

    least = min(found, key=excess)
    missing = [
        f"{name} needs {text_of(peak)} of {text_of(limit)}"
        for name, peak, limit in zip(names, least.peaks, limits, strict=True)
        if peak > limit
    ]
    return (
        f"nothing fits. In the candidate that comes closest {', '.join(missing)}, with chunks="
        f"{least.chunks}, schedule={least.schedule!r} and checkpoint={least.checkpoint!r}; use "
        "more devices, fewer rows, or more chunks"
    )
