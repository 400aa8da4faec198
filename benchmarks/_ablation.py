"""Switches off the parts of the runtime that the paper adds one by one (section 4.1).

The package has no switches for these parts. A step computes the same with and without them
(``tests/benchmarks/test_ablation.py``), but does not take the same time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd import order
from pipert.autograd.streams import CopyStreams, compute_stream
from pipert.skip.declarations import keys_of
from pipert.skip.store import Key
from pipert.stage import call_boundary
from pipert.stage.assembly import Layered

__all__ = ["ALL", "PARTS", "Components", "ComputeStreams", "only", "through_all_between"]


@dataclass(frozen=True)
class Components:
    """The parts of the runtime that are switched on."""

    fork_join: bool = True
    """Enforces a backward in reverse order of micro-batches, which autograd happens to take too."""
    copy_streams: bool = True
    """Copies run on streams of their own instead of those of the computation."""
    direct_skips: bool = True
    """Skips go straight to the partition that pops them, not through each one in between."""


ALL = Components()
PARTS = {
    "clock only": Components(fork_join=False, copy_streams=False, direct_skips=False),
    "+ fork/join": Components(copy_streams=False, direct_skips=False),
    "+ copy streams": Components(direct_skips=False),
    "+ direct skips": ALL,
}
"""The paper's rows: the parts are switched on one after the other."""


@contextmanager
def only(pipe: Pipe, components: Components) -> Iterator[None]:
    """Runs the calls of ``pipe`` in the block with only these parts.

    Fork and join are switched off for the whole process, so for other pipes too. Skips of a layer
    that is replaced in the block go straight.
    """
    runtime: Any = pipe._runtime
    with ExitStack() as stack:
        if not components.fork_join:
            stack.enter_context(_replaced(call_boundary, "order", _NO_ORDER))
        if not components.copy_streams:
            stack.enter_context(_replaced(runtime, "_streams", ComputeStreams()))
        if not components.direct_skips:
            partitions = pipe.partitions
            model = Layered(tuple(partitions), through_all_between(partitions))
            stack.enter_context(_replaced(runtime, "model", model))
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _no_fork(turn: int | None, token: None, *ys: Tensor) -> tuple[Tensor | None, ...]:
    return None, *ys


def _no_join(token: Tensor, *xs: Tensor) -> Sequence[Tensor]:
    raise AssertionError("there is a token to join, although nothing forked one")


_NO_ORDER = SimpleNamespace(fork=_no_fork, join=_no_join, begin_numbers=order.begin_numbers)


class ComputeStreams(CopyStreams):
    """Copy streams that are the streams of the computation."""

    def get(self, device: torch.device, i: int) -> torch.cuda.Stream | None:
        """Returns the stream that the current thread computes on; ``None`` on CPU."""
        return compute_stream(device)


def through_all_between(partitions: Sequence[nn.Sequential]) -> tuple[tuple[Key, ...], ...]:
    """Routes each skip through all partitions between its source and its last pop."""
    found = []
    for j in range(len(partitions)):
        before = keys_of(nn.Sequential(*partitions[: j + 1]))
        after = {key for later in partitions[j:] for key in keys_of(later)}
        found.append(tuple([key for key in before if key in after]))
    return tuple(found)
