"""Searches for the fastest step that fits the memory of the devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from pipert._typing import Device, Value
from pipert.balance.by_cost import balance_by_cost
from pipert.balance.by_time import now
from pipert.balance.probe import micro_batches
from pipert.batch.tensors import tensors_of
from pipert.model.devices import default_devices, parse_devices, where_tensors_are
from pipert.planning.layer_costs import LayerCost, layer_costs
from pipert.planning.memory import PartitionCost, peaks
from pipert.schedules.action import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, Action
from pipert.schedules.plan import Plan, plan, recomputed_in_each
from pipert.schedules.simulate import simulate

__all__ = ["Candidate", "Candidates", "plan_for"]


@dataclass(frozen=True)
class Candidate:
    """One way to train the model, and what is predicted of its step."""

    balance: tuple[int, ...]
    devices: tuple[str, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    schedule: str
    seconds: float
    """Of a step, without the optimizer."""
    peaks: tuple[int, ...]
    """The most bytes on each device, in the order of the devices."""

    @property
    def line(self) -> str:
        """The lines to paste."""
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else [*self.checkpoint]
        return (
            f"pipe = Pipe(module, {[*self.balance]}, devices={[*self.devices]}, "
            f"chunks={self.chunks}, checkpoint={checkpoint!r})\n"
            f"pipe.forward_backward(..., schedule={self.schedule!r})"
        )


class Candidates(tuple[Candidate, ...]):
    """Ways that fit, the fastest first. ``print`` shows them as a table, and the lines to paste."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("ms a step", "chunks", "schedule", "balance", "checkpoint", "GiB on each device")]
        for each in self:
            checkpoint = each.checkpoint
            rows.append((
                f"{1e3 * each.seconds:.2f}",
                str(each.chunks),
                each.schedule,
                " ".join(map(str, each.balance)),
                checkpoint if isinstance(checkpoint, str) else " ".join(checkpoint),
                " ".join(f"{peak / 2**30:.3g}" for peak in each.peaks),
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", self[0].line])


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
    device: Device | None = None,
    best: int = 5,
) -> Candidates:
    """Find the fastest steps of a model that fit the memory of its devices.

    >>> print(pipert.plan_for(module, x, memory="20GiB", loss_fn=loss, target=y))  # doctest: +SKIP

    Each layer is measured once for each number of chunks, on a copy, so that the model need not fit
    on one device. Then balances, schedules and the checkpoint of each partition are tried in a
    simulation.

    Args:
        module: the layers, as for :class:`Pipe`.
        example: a mini-batch, as large as those to train with.
        memory: how much each device may use: bytes, or a text such as ``'20GiB'``; or one for each
            device. Leave some for workspaces and fragmentation, which are not predicted.
        loss_fn, target: as in :meth:`Pipe.forward_backward`; the loss is measured as a part of the
            last layer. Default: it costs nothing.
        devices: the devices to use, each once. Default: as for :class:`Pipe`.
        chunks: the numbers of micro-batches to try. Default: one to eight times the number of
            devices, in powers of two.
        param_scale: the memory of a trained parameter with its gradient and the optimizer's state,
            relative to that of the parameter alone: 2 for SGD, 3 with momentum, 4 for Adam.
        device: where to measure. Default: the first of ``devices``.
        best: how many candidates to return, at most.

    Raises:
        ValueError: nothing fits; the message says what is missing.
        TypeError, Exception: as :func:`.layer_times`.
    """
    names = [str(each) for each in (default_devices(1) if devices is None else devices)]
    if devices is None and torch.cuda.is_available():
        names = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    d = len(names)
    limits = [_bytes(each) for each in _each(memory, d)]
    where = where_tensors_are(parse_devices(names))
    measured_on = where[0] if device is None else device
    layers = module if loss_fn is None else nn.Sequential(*module, _Loss(loss_fn))
    rows = len(next(iter(tensors_of(example)[0])))
    tried = chunks or [k * d for k in (1, 2, 4, 8) if k * d <= rows] or [1]
    sizes = [sum(tensor.nbytes for tensor in tensors_of(x)[0]) for x in (example, target)]
    found = list[Candidate]()
    for m in tried:
        (value, *_), (aim, *_) = micro_batches(example, m), micro_batches((target,), m)
        if loss_fn is not None:
            layers[-1].target = aim
        costs = layer_costs(layers, value, measured_on)
        found += _candidates(costs, loss_fn is not None, m, names, where, param_scale, sizes)
    fit = [each for each in found if all(a <= b for a, b in zip(each.peaks, limits, strict=True))]
    if not fit:
        raise ValueError(_what_is_missing(found, limits, names))
    fastest = sorted(fit, key=lambda each: (round(each.seconds, 9), sum(each.peaks)))
    return Candidates(fastest[:best])


class _Loss(nn.Module):
    """The loss, as a layer."""

    target: Any = None

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self._loss_fn = loss_fn

    def forward(self, y: Value) -> Tensor:
        return self._loss_fn(y, self.target)


def _candidates(
    costs: Sequence[LayerCost],
    has_loss: bool,
    m: int,
    names: list[str],
    where: list[torch.device],
    scale: float,
    sizes: list[int],
) -> Iterator[Candidate]:
    d = len(names)
    straight, turns, v = [*range(d)], [*range(d)] * 2, [*range(d), *reversed(range(d))]
    ways: list[tuple[list[int], tuple[str, ...]]] = [
        (straight, ("1f1b", "eager-1f1b", "zb-h1", "zb-h2"))
    ]
    if d > 1:
        ways += [(turns, ("interleaved",)), (v, ("zb-v",))]
    for placement, schedules in ways:
        n = len(placement)
        if n > len(costs) - has_loss:
            continue
        balance = balance_by_cost([cost.forward + cost.backward for cost in costs], n)
        ends = [0, *accumulate(balance)]
        parts = [PartitionCost.of(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        if has_loss and balance[-1] == 1:
            continue
        shown = [*balance[:-1], balance[-1] - has_loss]
        copying = _copy_times(parts, placement, where)
        for schedule in schedules:
            for modes in _modes(n):
                made = plan(schedule, m, n, placement, recomputed_in_each(modes, m, n))
                most = peaks(made, parts, scale, *sizes)
                seconds = _seconds(made, parts, copying)
                checkpoint = modes[0] if len(set(modes)) == 1 else modes
                on = tuple([names[k] for k in placement])
                yield Candidate(
                    tuple(shown), on, m, checkpoint, schedule, seconds, tuple(most)
                )


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
        f"{names[k]} needs {peak / 2**30:.2f} GiB of {limit / 2**30:.2f}"
        for k, (peak, limit) in enumerate(zip(least.peaks, limits, strict=True))
        if peak > limit
    ]
    return (
        f"nothing fits. The candidate that comes closest lacks {excess(least) / 2**30:.2f} GiB: "
        f"{', '.join(missing)}, with chunks={least.chunks}, schedule={least.schedule!r} and "
        f"checkpoint={least.checkpoint!r}; use more devices, fewer rows, or more chunks"
    )
