"""Searches for the fastest step that fits the memory of the devices."""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from operator import gt

import torch
from torch import nn
from torch.optim import Optimizer

from pipert._torch import NormBase
from pipert._typing import Device, Value
from pipert.balance.by_cost import check_partitions, minimise_longest_block
from pipert.balance.calls import micro_batches
from pipert.balance.counted import LINK
from pipert.balance.measure import Cost, joined, now, total, without
from pipert.batch.microbatch import arguments_of
from pipert.batch.tensors import tensors_of
from pipert.model.calls import settled
from pipert.model.cuts import homes, homes_outside_of_layers, layers_of, within
from pipert.model.device_map import device_map_of
from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.model.parameters import META
from pipert.model.split import is_sequential
from pipert.model.values import copy_of
from pipert.planning.candidate import Candidate, Candidates, Memory, limits_of, text_of
from pipert.planning.costs import LossFn, blocks_of, counted, refuse_quantised
from pipert.planning.memory import peaks
from pipert.planning.optimizer import OptimizerMemory, optimizer_memory
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan, plan, recomputed_in_each
from pipert.schedules.simulate import most_kept, simulate

__all__ = ["plan_for"]

_log = logging.getLogger("pipert")


def plan_for(
    model: nn.Module,
    example: Value,
    *,
    memory: Memory | Sequence[Memory],
    loss_fn: LossFn = None,
    target: Value = None,
    devices: Iterable[Device] | int | None = None,
    chunks: int | Sequence[int] | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    best: int = 5,
) -> Candidates:
    """Find the fastest steps that fit the memory of the devices.

    >>> found = plan_for(
    ...     module, x, target=target, loss_fn=loss_fn, memory="20GiB", devices=["cpu", "cpu"]
    ... )
    >>> with found[0].make(module) as pipe:
    ...     loss = pipe.forward_backward(x, target=target, loss_fn=loss_fn)

    Each layer is measured for each number of chunks, on a copy, so the model need not fit on one
    device. Then balances, schedules and the checkpoint of each partition are tried in a simulation,
    which takes seconds.

    Args:
        model: an ``nn.Sequential`` for :class:`Pipe`, or any module for :func:`pipeline`, whose own
            forward runs; it stays unchanged. Parameters on the meta device get made-up values, in
            one layer at a time.
        example: a mini-batch, as large as those to train with: the first layer's input, or
            arguments of the model as in :func:`pipeline`.
        memory: the limit of each device: bytes, or a text such as ``'20GiB'``; or a list with one
            for each. Leave some for workspaces and fragmentation, which are not predicted.
        loss_fn, target: as in :meth:`Pipe.forward_backward`; the loss is measured as a part of the
            last partition. Default: it costs nothing, unless the model computes it.
        devices: the devices to use, each once, or ``'cpu'`` for each logical CPU device; layers are
            measured on the first. Default: the CUDA devices in order, or two logical CPU devices. A
            number stands for GPUs that are not here: nothing is computed, and times are assumed.
        chunks: the number of micro-batches, or several to try. Default: one, two, four and eight
            times the number of devices, as far as there are rows: one for each micro-batch, two if
            the model has batch statistics.
        optimizer: the optimizer, or its class, such as ``torch.optim.AdamW``. Its step with small
            parameters shows how much memory its state takes, and the step itself. Default: none, as
            with plain SGD.
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
    if best < 1:
        raise ValueError(f"best must be 1 or more, got {best}")
    refuse_quantised(model)
    names, is_counted = _names(devices), isinstance(devices, int)
    where = META if is_counted else where_tensors_are(parse_devices(names[:1]))[0]
    limits = limits_of(memory, len(names))
    if isinstance(loss_fn, nn.Module):  # with class weights, perhaps
        loss_fn = copy_of(loss_fn, where)
    d, is_cut = len(names), not is_sequential(model)
    if is_cut:
        example = arguments_of(example)
    rows = min([len(tensor) for tensor in tensors_of(example)[0] if tensor.dim()], default=1)
    if any(isinstance(module, NormBase) and module.training for module in model.modules()):
        rows //= 2  # statistics need two
    tried = [chunks] if isinstance(chunks, int) else chunks
    tried = tried or [k * d for k in (1, 2, 4, 8) if k * d <= rows] or [1]
    # Several numbers of chunks may make the same micro-batches.
    firsts = {len(batches): batches[0] for batches in (micro_batches(example, m) for m in tried)}
    sizes = [sum(tensor.nbytes for tensor in tensors_of(x)[0]) for x in (example, target)]
    _log.info(
        "plan_for measures the layers on %s for chunks=%s: equal ones once, the others run some "
        "ten times each", where, tried,
    )  # fmt: skip
    state = optimizer_memory(optimizer, is_counted or where.type == "cuda")
    search = partial(_Search, names, limits, state, sizes, is_cut, is_counted)
    found, order, enough = list[Candidate](), dict[str, set[str]](), list[int]()
    with counted() if is_counted else contextlib.nullcontext():
        costs_for = blocks_of(model, loss_fn, d, where, firsts[min(firsts)], order)
        for m, value in firsts.items():
            aim = None if target is None else micro_batches(target, m)[0]
            aim = aim if is_counted else settled(aim, where)
            ways = search(m, costs_for(value, aim))
            found += ways.candidates()
            enough += ways.enough()
    fit = [each for each in found if not _excess(each, limits)]
    if not fit:
        least = min(found, key=lambda each: _excess(each, limits))
        raise ValueError(_what_is_missing(least, limits, names, enough))
    fastest = sorted(fit, key=lambda each: (round(each.seconds, 9), sum(each.peaks)))
    fewest = min([d, *enough])
    return Candidates([_placed(each, model, [*order], fewest) for each in fastest[:best]])


def _placed(each: Candidate, model: nn.Module, order: Sequence[str], fewest: int) -> Candidate:
    """Return a candidate that knows where each module goes, and how many devices would do."""
    devices = [torch.device(name) for name in each.devices]
    if each.cuts is None:
        ends = [0, *accumulate(each.balance)]
        home_of = {
            name: j
            for j, (a, b) in enumerate(pairwise(ends))
            for name in [*model._modules][a:b]
        }
    else:
        layers = layers_of(model, each.cuts)
        home_of = homes(layers, each.cuts, within(layers, order))
        home_of = {**{name: home_of[name] for name in within(layers, order)}, **home_of}
        home_of |= homes_outside_of_layers(model, layers, each.cuts, home_of)
    device_map = device_map_of(model, home_of, devices)
    return replace(each, fewest=fewest, order=tuple(order), device_map=device_map)


def _names(devices: Iterable[Device] | int | None) -> list[str]:
    """Return each device's name; logical CPU devices get a number, as they may be named twice."""
    if isinstance(devices, int):
        return [f"cuda:{k}" for k in range(check_partitions(devices))]
    parsed = map(str, default_devices(2) if devices is None else parse_devices(devices))
    names = [f"cpu:{k}" if name == "cpu" else name for k, name in enumerate(parsed)]
    if not names:
        raise ValueError("devices must name one device or more, got none")
    if len(set(names)) < len(names):
        raise ValueError(f"each device is named once, got {names}")
    return names


_STRAIGHT = ("1f1b", "eager-1f1b", "zb-h1", "zb-h2")
_BALANCES = 4
"""How many balances are tried with one schedule and modes."""


class _Search:
    """Finds ways to divide the blocks of a model and to run ``m`` micro-batches."""

    def __init__(
        self, names: list[str], limits: list[int], state: OptimizerMemory, sizes: list[int],
        is_cut: bool, is_counted: bool, m: int, costs: Mapping[str, Cost],
    ) -> None:  # fmt: skip
        self._names, self._limits, self._state, self._sizes = names, limits, state, sizes
        self._begins, self._is_cut, self._m = [*costs], is_cut, m
        blocks = [*costs.values()]
        self._seconds = [block.seconds for block in blocks]
        self._again = sum([block.forward for block in blocks]) / (sum(self._seconds) or 1.0)
        """What a recomputation takes of the time of the rest."""
        # With the gradients that a backward makes before it adds them to those in ``.grad``.
        scale = 2 + state.state
        weights = [total(each.parameters) + scale * total(each.trained) for each in blocks]
        self._weights = [0.0, *accumulate(weights)]
        saved = [total(without(each.saved, each.inputs)) for each in blocks]
        self._saved, self._blocks = [0, *accumulate(saved)], blocks
        self._is_counted = is_counted
        self._copy_time = cache(_copy_time)

    def candidates(self) -> Iterator[Candidate]:
        """Yield ways, with the balance that fits best of each."""
        d = len(self._names)
        check_partitions(d, len(self._begins))
        ways: list[tuple[list[int], tuple[str, ...]]] = [([*range(d)], _STRAIGHT)]
        if d > 1:
            ways += [([*range(d)] * 2, ("interleaved",))]
            ways += [([*range(d), *reversed(range(d))], ("zb-v",))]
        for placement, schedules in ways:
            n = len(placement)
            for schedule in schedules if n <= len(self._begins) else ():
                balanced = cache(partial(self._balanced, placement, schedule))
                never = balanced(("never",) * n)
                is_full = [*map(gt, never.peaks, self._limits)]
                modes = tuple([("never", "always")[is_full[k]] for k in placement])
                yield from map(balanced, dict.fromkeys([modes, *_modes(n)]))

    def enough(self) -> list[int]:
        """Return the least number of devices, like the smallest, that recompute all and fit."""

        def fits(d: int) -> bool:
            other = copy(self)
            other._names, other._limits = [*map(str, range(d))], [min(self._limits)] * d
            other._is_counted = True
            return not _excess(other._balanced([*range(d)], "1f1b", ("always",) * d), other._limits)

        counts = range(1, len(self._begins) + 1)
        k = bisect_left(counts, True, key=fits)
        return [*counts[k : k + 1]]

    def _balanced(
        self, placement: list[int], schedule: str, modes: tuple[str, ...]
    ) -> Candidate:
        """Return the way with the fastest balance that fits, or with one that comes close.

        What a partition may use is corrected by the peaks of the balance before.
        """
        n = len(placement)
        made = plan(schedule, self._m, n, placement, recomputed_in_each(modes, self._m, n))
        keeps = most_kept(made, range(n))
        speeds = [1 / (1 + self._again * (mode == "always")) for mode in modes]
        rooms = [math.inf] * n
        tried = dict[tuple[int, ...], Candidate]()

        def used(j: int, a: int, b: int) -> float:
            saved, given = self._saved[b] - self._saved[a], total(self._blocks[a].inputs)
            kept = given if modes[j] == "always" else saved
            return self._weights[b] - self._weights[a] + saved + given + (keeps[j] - 1) * kept

        def fits(j: int, a: int, b: int) -> bool:
            return used(j, a, b) <= rooms[j]

        while len(tried) < _BALANCES:
            found = tuple(minimise_longest_block(self._seconds, speeds, fits=fits))
            if not found or found in tried:
                break
            ends = [0, *accumulate(found)]
            parts = [self._blocks[a:b] for a, b in pairwise(ends)]
            each = tried[found] = Candidate(
                found,
                tuple([self._begins[k] for k in ends[1:-1]]) if self._is_cut else None,
                tuple([self._names[k] for k in placement]),
                self._m,
                modes[0] if len(set(modes)) == 1 else modes,
                schedule,
                self._time(made, [*map(joined, parts)]),
                tuple(peaks(made, parts, self._state, *self._sizes)),
                tuple(self._limits),
                self._is_counted,
            )
            if not _excess(each, self._limits):
                break
            for j, k in enumerate(placement):
                left = self._limits[k] - each.peaks[k]
                rooms[j] = used(j, *ends[j : j + 2]) + left / placement.count(k)
        return min(tried.values(), key=lambda each: (_excess(each, self._limits), each.seconds))

    def _time(self, made: Plan, parts: Sequence[Cost]) -> float:
        """Return the seconds of a step."""
        backward = "split" if WEIGHT in made.occurring_kinds else "backward"
        names = {FORWARD: "forward", RECOMPUTE: "forward", BACKWARD: backward, WEIGHT: "weight"}

        def seconds(action: Action) -> float:
            return float(getattr(parts[action.j], names[action.kind]))

        def copying(j: int, to: int) -> float:
            source, target = (self._names[made.placement[k]] for k in sorted((j, to)))
            if self._is_counted:
                return total(parts[max(j, to)].inputs) / LINK * (source != target)
            return self._copy_time(source, target, total(parts[max(j, to)].inputs))

        return max(end for _, end in simulate(made, seconds, copying).values())


def _modes(n: int) -> Iterator[tuple[str, ...]]:
    """Yield modes of partitions: all of a few; else those that recompute the first partitions,
    which keep most."""
    if n <= 3:
        yield from product(("never", "always"), repeat=n)
    else:
        yield from [("always",) * k + ("never",) * (n - k) for k in range(n + 1)]


def _copy_time(source: str, target: str, size: int) -> float:
    """Return the measured seconds of a copy from device to device."""
    devices = where_tensors_are(parse_devices([source, target]))
    if devices[0] == devices[1]:
        return 0.0
    sent = torch.empty(size, dtype=torch.uint8, device=devices[0])
    for _ in range(2):  # the first time to warm up
        now(devices[0])
        begin = now(devices[1])
        sent.to(devices[1])
        seconds = now(devices[1]) - begin
    return seconds


def _excess(each: Candidate, limits: Sequence[int]) -> int:
    """Return by how many bytes a device has too little, at most."""
    return max(0, *[peak - limit for peak, limit in zip(each.peaks, limits, strict=True)])


def _what_is_missing(
    least: Candidate, limits: Sequence[int], names: Sequence[str], enough: Sequence[int]
) -> str:
    missing = [
        f"{name} needs {text_of(peak)} of {text_of(limit)}"
        for name, peak, limit in zip(names, least.peaks, limits, strict=True)
        if peak > limit
    ]
    more = f"{min(enough)} devices with {text_of(min(limits))} each" if enough else "larger devices"
    return (
        f"nothing fits. In the candidate that comes closest {', '.join(missing)}, with chunks="
        f"{least.chunks}, schedule={least.schedule!r} and checkpoint={least.checkpoint!r}; use "
        f"{more}, fewer rows, or more chunks"
    )
