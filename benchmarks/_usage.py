"""Tabulates this process's resources over time, and detects growth.

The first quarter of the samples is warm-up. *Constant* columns must not change from then on.
Columns with a *trend*, which allocators and caches disturb, are judged by medians: the last
quarter's median may exceed the second's by at most an allowance. A steady leak shows half of its
total there; one-time or temporary allocations do not show.

Columns missing on the platform are left out. Without ``/proc`` the resident memory is the
peak so far, which shows a trend as well.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from types import BuiltinFunctionType

import torch
from _malloc import bytes_in_use, check_counter
from torch import Tensor

__all__ = ["COLUMNS", "Column", "collect", "freeze", "growth", "head", "line", "resident", "sample"]

_MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_PLANS = import_module("pipert.schedules.plan")  # the module; the package has a function ``plan``


@dataclass(frozen=True)
class Column:
    """A resource to watch."""

    name: str
    read: Callable[[], float]
    allowance: float | None
    """The permitted growth of the median; ``None`` if the number must be constant."""
    digits: int = 0
    why: str = ""


def _status(field: str) -> float:
    """Reads a number from ``/proc/self/status``."""
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return float(value.split()[0])
    raise LookupError(field)


def resident() -> float:
    """Returns the resident memory in MiB, or its peak so far if the platform tells only that."""
    if _STATUS.exists():
        return _status("VmRSS") / 1024
    try:
        resource = import_module("resource")
    except ImportError:
        return 0.0  # a platform with neither
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (_MIB if sys.platform == "darwin" else 1024)


def _tensors() -> float:
    # type() rather than isinstance(), which would run code of proxies.
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def _objects() -> float:
    """Counts what the collector knows, but for weak references of CPython's abstract classes."""
    left_out = (weakref.ReferenceType, BuiltinFunctionType)
    return sum(type(thing) not in left_out for thing in gc.get_objects())


def _reserved() -> float:
    return sum(torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count())) / _MIB


def _columns() -> tuple[Column, ...]:
    columns = [
        Column("threads", threading.active_count, None),
        Column("tensors", _tensors, None),
        Column("objects", _objects, 20, why="caches of torch and Python"),
        Column("resident MiB", resident, 6, 1, why="malloc's arenas and their fragments"),
    ]
    if _STATUS.exists():
        why = "threads that torch starts when it first needs them"
        columns.insert(1, Column("in the OS", lambda: _status("Threads"), 1, why=why))
    if not check_counter(100_000):
        why = "blocks that malloc keeps ready for each thread"
        malloc = Column("malloc MiB", lambda: bytes_in_use() / _MIB, 0.5, 3, why)
        columns.insert(-1, malloc)
    if torch.cuda.is_available():
        why = "the allocator's cache"
        columns.append(Column("CUDA reserved MiB", _reserved, 4, 1, why))
    return tuple(columns)


COLUMNS = _columns()


def collect() -> None:
    """Collects garbage until there is none, after clearing the caches of plans.

    Each cache holds at most 64 plans, each with as many objects as it has actions.
    """
    _PLANS._named.cache_clear()
    _PLANS._plan.cache_clear()
    while gc.collect():
        pass


def freeze() -> None:
    """Excludes all existing objects from later counts; counting them would take seconds."""
    collect()
    gc.freeze()


def sample() -> tuple[float, ...]:
    """Collects garbage, and reads a number for each of ``COLUMNS``."""
    collect()
    return tuple([column.read() for column in COLUMNS])


def head() -> str:
    """Formats the two header lines of the table."""
    names = ("time", "steps", *(column.name for column in COLUMNS))
    ruler = "|".join(f"{'-' * (max(len(name), 7) + 1)}:" for name in names)
    return f"|{'|'.join(f' {name:>7} ' for name in names)}|\n|{ruler}|"


def line(seconds: float, steps: int, numbers: Sequence[float]) -> str:
    """Formats a sample as a line of the table."""
    cells = [f" {f'{seconds:.1f} s':>7} ", f" {steps:>7} "]
    for column, number in zip(COLUMNS, numbers, strict=True):
        cells.append(f" {f'{number:.{column.digits}f}':>{max(len(column.name), 7)}} ")
    return f"|{'|'.join(cells)}|"


def quarters(numbers: Sequence[float]) -> list[Sequence[float]]:
    """Splits the samples into four parts, in order."""
    n = len(numbers)
    return [numbers[n * k // 4 : n * (k + 1) // 4] for k in range(4)]


def growth(samples: Sequence[Sequence[float]]) -> list[str]:
    """Describes each column that grew; needs 8 samples or more."""
    grown = []
    for column, numbers in zip(COLUMNS, zip(*samples, strict=True), strict=True):
        _, second, third, last = quarters(numbers)
        if column.allowance is None:
            seen = sorted({*second, *third, *last})
            if len(seen) > 1:
                grown.append(f"{column.name}: must be constant, went from {seen[0]:.0f} to"
                             f" {seen[-1]:.0f}")  # fmt: skip
            continue
        before, after = median(second), median(last)
        if after - before > column.allowance:
            grown.append(
                f"{column.name}: median {before:.{column.digits}f} in the second quarter, "
                f"{after:.{column.digits}f} in the last, allowed is {column.allowance:g} more "
                f"({column.why})"
            )
    return grown
