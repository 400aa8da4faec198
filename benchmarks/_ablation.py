"""A pipe without a part of the runtime that the paper adds one by one (section 4.1).

The package has no switch for these. What is computed is the same with and without
(``tests/benchmarks/test_ablation.py``); what a step takes is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipert import Pipe
from pipert.autograd.streams import CopyStreams, compute_stream
from pipert.skip.namespace import Key
from pipert.skip.routes import PartitionSkips, routes
from pipert.stage import in_graph
from pipert.stage.assembly import Layered

__all__ = ["ALL", "Components", "ComputeStreams", "only", "through_all_between"]


@dataclass(frozen=True)
class Components:
    """Which parts there are."""

    fork_join: bool = True
    """Micro-batches must go back in reverse order; else they do since autograd takes them so."""
    copy_streams: bool = True
    """Copies have streams of their own; else those of the computation."""
    direct_skips: bool = True
    """Skips go straight to who pops them; else through every partition in between."""


ALL = Components()


@contextmanager
def only(pipe: Pipe, components: Components) -> Iterator[None]:
    """Let the calls of ``pipe`` in the block have these parts alone.

    Fork and join are one for the process: in the block no other pipe has them either. A layer that
    is replaced in the block gets its skips straight.
    """
    runtime: Any = pipe._runtime
    with ExitStack() as stack:
        if not components.fork_join:
            stack.enter_context(_with(in_graph, "order", _NO_ORDER))
        if not components.copy_streams:
            stack.enter_context(_with(runtime, "_streams", ComputeStreams()))
        if not components.direct_skips:
            partitions = pipe.partitions
            model = Layered(tuple(partitions), through_all_between(partitions))
            stack.enter_context(_with(runtime, "model", model))
        yield


@contextmanager
def _with(of: object, name: str, value: object) -> Iterator[None]:
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)


def _no_fork(turn: int | None, token: None, *ys: Tensor) -> tuple[Tensor | None, ...]:
    return None, *ys


def _no_join(token: Tensor, *xs: Tensor) -> Sequence[Tensor]:
    raise AssertionError("nobody has a token to join")


_NO_ORDER = SimpleNamespace(fork=_no_fork, join=_no_join)


class ComputeStreams(CopyStreams):
    """The streams of the computation, for copies too."""

    def get(self, device: torch.device, i: int) -> torch.cuda.Stream | None:
        """The stream that the current thread computes on; ``None`` on CPU."""
        return compute_stream(device)


def through_all_between(partitions: Sequence[nn.Sequential]) -> tuple[PartitionSkips, ...]:
    """The skips of each partition, if those in between get them and send them on."""
    direct = routes(partitions)
    source: dict[Key, int] = {}
    pops: dict[Key, dict[int, int]] = {}
    for j, skips in enumerate(direct):
        here = {key for key, _ in skips.arriving}
        for key, count in skips.pops.items():
            pops.setdefault(key, {})[j] = count
            if key not in here:
                source[key] = j
    return tuple([_of_partition(j, source, pops) for j in range(len(partitions))])


def _of_partition(
    j: int, source: Mapping[Key, int], pops: Mapping[Key, Mapping[int, int]]
) -> PartitionSkips:
    here = {key: by.get(j, 0) for key, by in pops.items() if source[key] <= j <= max(by)}
    arriving = [(key, j - 1) for key in here if source[key] != j]
    leaving = [(key, j + 1) for key in here if j != max(pops[key])]
    return PartitionSkips(tuple(arriving), tuple(leaving), here)
