"""Chooses and makes torch's schedules, by their names in torch and in pipert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from pipert.distributed.torch_stage import Stage

__all__: list[str] = []

# With one partition on each rank, and with several.
_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
    "zbvzerobubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
_V_SHAPED = ("zbvzerobubble", "dualpipev")
_SPLITTING = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
NAMES = ("gpipe", "1f1b", "interleaved", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def check_schedule(schedule: Any, n: int, ranks: int, checkpoint: str) -> str:
    """Check that a schedule fits ``n`` partitions on that many ranks; return its name.

    Raises:
        TypeError: the schedule is not a name.
        ValueError: no schedule has that name, or it does not fit the partitions or ``checkpoint``.
    """
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule must be one of {list(NAMES)}, got {schedule!r}: torch's runtime takes no "
            "plan of yours by a public name; a pipert.Pipe does"
        )
    name = schedule.lower()
    if name not in _SINGLE and name not in _MULTI:
        raise ValueError(f"schedule must be one of {list(NAMES)}, got {schedule!r}")
    if n % ranks:
        raise ValueError(
            f"each rank must have as many partitions as the others, but balance has {n} for "
            f"{ranks} ranks; give it {ranks} entries, or a multiple of that with "
            "schedule='interleaved'"
        )
    if name in _SINGLE and n != ranks:
        raise ValueError(
            f"schedule {schedule!r} has one partition for each of the {ranks} ranks, but balance "
            f"has {n}; use schedule='interleaved' for {n // ranks} on each"
        )
    if name in _V_SHAPED and n != 2 * ranks:
        raise ValueError(
            f"schedule {schedule!r} has two partitions for each of the {ranks} ranks, but balance "
            f"has {n}"
        )
    if name in _SPLITTING and checkpoint != "never":
        raise ValueError(
            f"schedule {schedule!r} splits each backward in two, which would recompute twice; use "
            f"checkpoint='never', or another schedule (checkpoint is {checkpoint!r})"
        )
    return "1f1b" if name == "interleaved" and n == ranks else name


def ranks_of(name: str, n: int, ranks: int) -> list[int]:
    """Return for each partition the index of its rank within the pipeline."""
    if name in _V_SHAPED:
        return [*range(ranks), *reversed(range(ranks))]
    return [j % ranks for j in range(n)]


def make_schedule(
    name: str, stages: list[Stage], m: int, loss_fn: Callable[..., Any] | None
) -> Any:
    """Make torch's schedule for ``m`` micro-batches; forward only without a ``loss_fn``.

    Raises:
        ValueError: torch's schedule does not take that many.
    """
    if name in _SINGLE:
        kind: Any = _SINGLE[name]
        if loss_fn is None or m < stages[0].num_stages:
            kind = ScheduleGPipe  # with so few micro-batches 1F1B is the same
        return kind(stages[0], m, loss_fn=loss_fn, scale_grads=False)
    kind = ScheduleLoopedBFS if loss_fn is None and name not in _V_SHAPED else _MULTI[name]
    return kind(stages, m, loss_fn=loss_fn, scale_grads=False)
