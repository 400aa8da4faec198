"""Searches for the fastest step that fits the memory of the devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost
from pipert.balance.by_time import now
from pipert.balance.probe import copied, micro_batches
from pipert.batch.tensors import tensors_of
from pipert.model.calls import settled
from pipert.model.devices import parse_devices, where_tensors_are
from pipert.model.settings import check_chunks
from pipert.model.split import check_module
from pipert.planning.candidate import Candidate, Candidates, text_of
from pipert.planning.layer_costs import LayerCost, layer_costs
from pipert.planning.memory import PartitionCost, peaks
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan, plan, recomputed_in_each
from pipert.schedules.simulate import simulate

__all__ = ["plan_for"]


def plan_for(
    module: nn.Sequential,
    example: Value,
    *,
    memory: int | str | Sequence[int | str],
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
        module: the layers, as for :class:`Pipe`; it stays unchanged.
        example: a mini-batch, as large as those to train with.
        memory: how much each device may use: bytes, or a text such as ``'20GiB'``; or one for each
            device. Leave some for workspaces and fragmentation, which are not predicted.
        loss_fn, target: as in :meth:`Pipe.forward_backward`; the loss is measured as a part of the
            last partition. Default: it costs nothing.
        devices: the devices to use, each once, or ``'cpu'`` for each logical CPU device; layers are
            measured on the first. Default: the CUDA devices in order, or one CPU.
        chunks: the numbers of micro-batches to try. Default: one, two, four and eight times the
            number of devices, as far as there are rows.
        param_scale: the memory of a trained parameter with its gradient and the optimizer's state,
            relative to that of the parameter alone: 2 for SGD, 3 with momentum, 4 for Adam.
        best: how many candidates to return, at most.

    Returns:
        The candidates that fit, the fastest first.

    Raises:
        ValueError: nothing fits; the message says what is missing. Or an argument is wrong.
        TypeError: ``module`` is not a plain ``nn.Sequential``.
        Exception: whatever a layer raises, with a note that names the layer.
    """
    check_module(module)
    if param_scale < 2:
        raise ValueError(f"param_scale is 2 with gradients alone, or more, got {param_scale}")
    names = _names(devices)
    where = where_tensors_are(parse_devices(names))
    limits = [_bytes(each) for each in _each(memory, len(names))]
    rows = min([len(tensor) for tensor in tensors_of(example)[0] if tensor.dim()], default=1)
    tried = chunks or [k * len(names) for k in (1, 2, 4, 8) if k * len(names) <= rows] or [1]
    sizes = [sum(tensor.nbytes for tensor in tensors_of(x)[0]) for x in (example, target)]
    search = _Search(names, where, loss_fn is not None, param_scale, sizes)
    found = list[Candidate]()
    if isinstance(loss_fn, nn.Module):  # with class weights, perhaps
        loss_fn = copied(loss_fn, where[0])
    for m in map(check_chunks, tried):
        layers = [*module]
        if loss_fn is not None:
            aim = None if target is None else micro_batches(target, m)[0]
            layers.append(_Loss(loss_fn, settled(aim, where[0])))
        value, *others = micro_batches(example, m)
        costs = layer_costs(nn.Sequential(*layers), value, where[0])
        found += search.candidates(costs, 1 + len(others))
    fit = [each for each in found if all(a <= b for a, b in zip(each.peaks, limits, strict=True))]
    if not fit:
        raise ValueError(_what_is_missing(found, limits, names))
    fastest = sorted(fit, key=lambda each: (round(each.seconds, 9), sum(each.peaks)))
    return Candidates(fastest[:best])


def _names(devices: Iterable[Device] | None) -> list[str]:
    """Return each device's name; logical CPU devices get a number, as they may be named twice."""
    if devices is None:
        return [f"cuda:{k}" for k in range(torch.cuda.device_count())] or ["cpu:0"]
    names = [f"cpu:{k}" if name == "cpu" else name for k, name in enumerate(map(str, devices))]
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
    has_loss: bool
    scale: float
    sizes: list[int]
    """The bytes of the mini-batch, and of the targets."""

    def candidates(self, costs: Sequence[LayerCost], m: int) -> Iterator[Candidate]:
        """Yield all ways with ``m`` micro-batches."""
        d = len(self.names)
        ways: list[tuple[list[int], tuple[str, ...]]] = [([*range(d)], _STRAIGHT)]
        if d > 1:
            ways += [([*range(d)] * 2, ("interleaved",))]
            ways += [([*range(d), *reversed(range(d))], ("zb-v",))]
        layers = [cost.forward + cost.backward for cost in costs]
        if self.has_loss:  # which stays with the last layer
            layers[-2:] = [sum(layers[-2:])]
        for placement, schedules in ways:
            n = len(placement)
            if n > len(layers):
                continue
            balance = balance_by_cost(layers, n)
            ends = [0, *accumulate(balance[:-1]), len(costs)]
            parts = [PartitionCost.of(costs[a:b]) for a, b in pairwise(ends)]
            copying = _copy_times(parts, placement, self.where)
            devices = tuple([self.names[k] for k in placement])
            for schedule, modes in product(schedules, _modes(n)):
                made = plan(schedule, m, n, placement, recomputed_in_each(modes, m, n))
                yield Candidate(
                    tuple(balance),
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
            sent = torch.empty(parts[j].sent, dtype=torch.uint8, device=source)
            for _ in range(2):  # the first time to warm up
                now(source)
                begin = now(target)
                sent.to(target)
                seconds = now(target) - begin
        times[j, j + 1] = times[j + 1, j] = seconds
    return lambda j, to: times[j, to]


def _each(memory: int | str | Sequence[int | str], d: int) -> list[int | str]:
    if isinstance(memory, (int, str)):
        return [memory] * d
    if len(memory) != d:
        raise ValueError(f"memory must be one limit, or one for each of {d} devices, got {memory}")
    return [*memory]


_UNITS = {"": 1, "B": 1, **{f"{k}B": 10 ** (3 * p) for p, k in enumerate("KMGT", 1)}}
_UNITS |= {f"{k}IB": 2 ** (10 * p) for p, k in enumerate("KMGT", 1)}


def _bytes(memory: int | str) -> int:
    """Return a number of bytes, given as such or as a text such as ``'20GiB'``."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", str(memory))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"memory is a number of bytes, or a text such as '20GiB', got {memory!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


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
