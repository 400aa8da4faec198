"""Chooses and makes torch's schedules, by their names in torch and in pipert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import ScheduleGPipe, ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import get_schedule_class

from pipert.distributed.rank_stage import RankStage

_SINGLE = ("gpipe", "1f1b")  # with one partition on each rank
_V_SHAPED = "zbvzerobubble"  # with two
_SPLITTING = ("interleavedzerobubble", _V_SHAPED)
NAMES = ("gpipe", "1f1b", "interleaved", "InterleavedZeroBubble", "ZBVZeroBubble")


def check_schedule(schedule: Any, n: int, ranks: int, checkpoint: str) -> str:
    """Check that a schedule fits ``n`` partitions on that many ranks; return its name."""
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be one of {list(NAMES)}, got {schedule!r}: torch's runtime takes no "
            "plan of yours by a public name; a pipert.Pipe does"
        )
    name = schedule.lower()
    if name not in map(str.lower, NAMES):
        raise ValueError(f"schedule must be one of {list(NAMES)}, got {schedule!r}")
    needed, fits = "a multiple of the ranks", n % ranks == 0
    if name in _SINGLE:
        needed, fits = "one partition on each rank", n == ranks
    if name == _V_SHAPED:
        needed, fits = "two partitions on each rank", n == 2 * ranks
    if not fits:
        raise ValueError(
            f"schedule {schedule!r} needs {needed}, but there are {n} partitions for {ranks} "
            "ranks; 'interleaved' takes any multiple"
        )
    if name in _SPLITTING and checkpoint != "never":
        raise ValueError(
            f"schedule {schedule!r} puts gradients of weights off, which a backward that recomputes"
            f" cannot; use checkpoint='never', or another schedule (checkpoint is {checkpoint!r})"
        )
    return "1f1b" if name == "interleaved" and n == ranks else name


def ranks_of(name: str, n: int, ranks: int) -> list[int]:
    """Return for each partition the index of its rank within the pipeline."""
    if name == _V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [j % ranks for j in range(n)]


def make_schedule(
    name: str, stages: list[RankStage], m: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """Make torch's schedule for ``m`` micro-batches; forward only without a ``loss_fn``."""
    made: Any = get_schedule_class("Interleaved1F1B" if name == "interleaved" else name)
    if name in _SINGLE:
        if loss_fn is None or m < stages[0].num_stages:
            made = ScheduleGPipe  # with so few micro-batches 1F1B is the same
        return made(stages[0], m, loss_fn=loss_fn, scale_grads=False)
    if loss_fn is None and name != _V_SHAPED:
        made = ScheduleLoopedBFS
    return made(stages, m, loss_fn=loss_fn, scale_grads=False)
