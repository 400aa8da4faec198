"""Holds the ways to train a model that ``plan_for`` has found, and shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from typing import Any

import torch
from torch import nn

from pipert.model.cuts import within
from pipert.pipe import Pipe
from pipert.pipeline import close_older
from pipert.pipes.module_pipe import ModulePipe
from pipert.planning.memory import DeviceMemory

__all__ = ["Candidate", "Candidates"]


@dataclass(frozen=True)
class Candidate:
    """One way to train the model, with the predicted time and memory of a step."""

    balance: tuple[int, ...]
    """The number of layers in each partition, or of blocks of a model that is cut."""
    cuts: tuple[str, ...] | None
    """The names of the modules at which to cut, if the model is no ``nn.Sequential``."""
    devices: tuple[str, ...]
    chunks: int
    checkpoint: str | tuple[str, ...]
    schedule: str
    seconds: float
    """The time of a step, without the optimizer; on CPU without what tasks cost by themselves."""
    memory: tuple[DeviceMemory, ...]
    """The bytes at the peak of each device, in the order of the devices."""
    limits: tuple[int, ...]
    """The bytes that each device may use."""
    is_counted: bool
    """Whether times are of operations that were counted, at assumed rates, rather than measured."""
    fewest: int = field(default=0, compare=False)
    """How many devices would do, all like the smallest: with 1f1b that recomputes all partitions,
    each once, and the chunks that were tried."""
    order: tuple[str, ...] = field(default=(), repr=False)
    """The layers, in the order of their first calls."""
    device_map: Mapping[str, int | str] = field(default_factory=dict, repr=False, compare=False)
    """Where each module goes, for ``from_pretrained(folder, device_map=plan.device_map)``."""

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most bytes on each device, in the order of the devices."""
        return tuple(map(sum, self.memory))

    def report(self) -> str:
        """Return a table of the memory of each device, and the time of a step."""
        names = dict.fromkeys(self.devices)
        columns = "device", "weights", "gradients", "optimizer", "activations", "peak", "limit"
        rows: list[Sequence[str]] = [columns]
        for name, memory, limit in zip(names, self.memory, self.limits, strict=True):
            rows.append((name, *map(text_of, (*memory, sum(memory), limit))))
        how = "assumed, from counted operations" if self.is_counted else "measured layer by layer"
        seconds = f"{1e3 * self.seconds:.2f} ms a step without the optimizer, {how}"
        plan = f"{self.schedule}, {self.chunks} chunks, checkpoint {_runs(self.checkpoint)}"
        enough = f"devices that would do, if all is recomputed: {self.fewest}"
        return "\n".join([plan, seconds, "", *aligned(rows), "", enough])

    def make(self, model: nn.Module, **settings: Any) -> Pipe | ModulePipe:
        """Make the planned pipe of ``model``.

        Args:
            model: the model of the plan, or an equal one: loaded with its ``device_map``, or
                without values, with ``load=`` as in :func:`pipeline`, or on the host.
            **settings: arguments of :class:`Pipe` or :func:`pipeline` to add or to replace.

        Raises:
            torch.OutOfMemoryError: a device is full; a note says what the plan predicts.
        """
        names = "devices", "chunks", "checkpoint", "schedule"
        settings = {**{name: getattr(self, name) for name in names}, **settings}
        try:
            if self.cuts is None and "load" not in settings:
                assert isinstance(model, nn.Sequential)
                return Pipe(model, self.balance, **settings)
            close_older(model)
            layers = [*model._modules]
            cuts = self.cuts or [layers[k] for k in accumulate(self.balance[:-1])]
            return ModulePipe(model, cuts, self._order_of, **settings)
        except torch.OutOfMemoryError as error:
            error.add_note(f"the plan is {self.report()}")
            raise

    def _order_of(self, layers: Mapping[str, nn.Module], cuts: Sequence[str]) -> list[str]:
        return within(layers, self.order)

    @property
    def line(self) -> str:
        """The code that makes this pipe, one line to paste."""
        checkpoint = self.checkpoint if isinstance(self.checkpoint, str) else [*self.checkpoint]
        how = f"Pipe(module, {[*self.balance]}"
        if self.cuts is not None:
            how = f"pipeline(model, {[*self.cuts]}"
        return (
            f"pipe = {how}, devices={[*self.devices]}, chunks={self.chunks}, "
            f"checkpoint={checkpoint!r}, schedule={self.schedule!r})"
        )


class Candidates(tuple[Candidate, ...]):
    """The candidates that fit, the fastest first. ``print`` shows a table, and code to paste."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("ms a step", "chunks", "schedule", "balance", "checkpoint", "peak of each device")]
        for each in self:
            rows.append((
                f"{1e3 * each.seconds:.2f}", str(each.chunks), each.schedule, _runs(each.balance),
                _runs(each.checkpoint), _runs([*map(text_of, each.peaks)]),
            ))  # fmt: skip
        return "\n".join([*aligned(rows), "", self[0].report(), "", self[0].line])


def _runs(values: str | Iterable[Any]) -> str:
    """Return values as a text such as ``'30 x always, never, never'``."""
    runs = [(value, len([*run])) for value, run in groupby(values)]
    texts = [[f"{count} x {value}"] if count > 2 else [str(value)] * count for value, count in runs]
    return values if isinstance(values, str) else ", ".join(chain(*texts))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def text_of(size: int) -> str:
    """Return a number of bytes as a text such as ``'1.5 GiB'``."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    number = size / 2 ** (10 * power)
    return f"{number:.{3 if number < 999.5 else 4}g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


Memory = float | str


def limits_of(memory: Memory | Sequence[Memory], d: int) -> list[int]:
    """Return the bytes that each of ``d`` devices may use."""
    each = memory if isinstance(memory, (list, tuple)) else [memory] * d
    if len(each) != d:
        raise ValueError(f"memory must be one limit, or one for each of {d} devices, got {memory}")
    return [*map(bytes_of, each)]


_UNITS = {"": 1, "B": 1, **{f"{k}B": 10 ** (3 * p) for p, k in enumerate("KMGT", 1)}}
_UNITS |= {f"{k}IB": 2 ** (10 * p) for p, k in enumerate("KMGT", 1)}


def bytes_of(memory: float | str) -> int:
    """Return a number of bytes, given as such or as a text such as ``'20GiB'``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", str(memory))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"memory is a number of bytes, or a text such as '20GiB', got {memory!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])
