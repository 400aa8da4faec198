"""Make the pictures of these pages: ``python docs/make_pictures.py``, into ``docs/pictures``.

All but one are recordings: a pipe on CPU runs stages that sleep, and ``timeline.plot`` draws the
events, to one scale where timelines are compared. Sleeping stages overlap
on any machine, so the pictures show only the schedule. Where gradients of weights are put off, each
matrix product sleeps. On CPU the backward of all partitions runs in one thread, except in
``forward_backward``. The picture for GPUs, with copies, is computed from the rules of the schedule,
and its caption says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipert import Event, Pipe, Timeline, pipeline
from pipert.observe.timeline import save_picture

PICTURES = Path(__file__).parent / "pictures"
ROWS = 32


class _Sleep(torch.autograd.Function):
    """Takes time forward, and twice as much backward, in one node as long as the stage."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x)  # or there would be nothing to recompute
        time.sleep(seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        _ = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return grads[0], grads[0].sum(), None


class Stage(nn.Module):
    """A layer that takes ``seconds`` for a mini-batch, and its share of that for a micro-batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds * len(x) / ROWS
        y: Tensor = _Sleep.apply(x, self.weight, seconds)  # type: ignore[no-untyped-call]
        return y


def recorded(
    seconds: Sequence[float],
    chunks: int,
    *,
    steps: int,
    checkpoint: str = "never",
    backward: bool = True,
    schedule: str | None = None,
) -> Timeline:
    """Records the fastest of ``steps`` of a pipe with one stage for each of ``seconds``.

    The fastest, because the pictures should not show other programs' load.
    """
    stages = nn.Sequential(*map(Stage, seconds))
    n, x = len(seconds), torch.ones(ROWS, 1)
    timelines = []
    with Pipe(stages, [1] * n, devices=["cpu"] * n, chunks=chunks, checkpoint=checkpoint) as pipe:
        for _ in range(steps):
            with pipe.record() as timeline, torch.set_grad_enabled(backward):
                if schedule is not None:
                    pipe.forward_backward(x, loss_fn=_total, schedule=schedule)
                else:
                    y = pipe(x)
                    if backward:
                        y.sum().backward()
            timelines.append(timeline)
    return fastest(timelines)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a matrix product take ``seconds`` for a mini-batch, or its share of that."""

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds = seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            time.sleep(self._seconds * max(args[0].shape) / ROWS)
        return func(*args, **kwargs or {})


def apart(schedule: str, devices: Sequence[str], *, steps: int) -> Timeline:
    """Records the fastest of ``steps`` of layers of one product forward, one in B and one in W."""
    layers = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in devices])
    x, each = torch.ones(ROWS, 1, requires_grad=True), [1] * len(devices)
    products = _Products(0.32 * len(set(devices)) / len(devices))
    timelines = []
    with Pipe(layers, each, devices=devices, chunks=6, checkpoint="never") as pipe, products:
        for _ in range(steps):
            with pipe.record() as timeline:
                pipe.forward_backward(x, loss_fn=_total, schedule=schedule)
            timelines.append(timeline)
    return fastest(timelines)


def fine_tuned(seconds: Sequence[float], rows: Sequence[int], *, steps: int) -> Timeline:
    """Records the fastest of ``steps`` of a model in place; each micro-batch has its ``rows``."""
    model = nn.Sequential(*map(Stage, seconds))
    cuts, devices = [str(j) for j in range(1, len(seconds))], ["cpu"] * len(seconds)
    microbatches = [torch.ones(number, 1) for number in rows]
    timelines = []
    with pipeline(model, cuts, devices=devices, checkpoint="never") as pipe:
        for _ in range(steps):
            with pipe.record() as timeline:
                pipe.forward_backward(microbatches=microbatches, step=lambda x: model(x).sum())
            timelines.append(timeline)
    return fastest(timelines)


def fastest(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the shortest."""
    return min(timelines, key=lambda timeline: max(event.end for event in timeline.events))


def _total(y: Tensor, _: object) -> Tensor:
    return y.sum()


def drawn(m: int, n: int, task: float, copy: float) -> Timeline:
    """Computes the schedule on *n* GPUs, without measuring anything.

    Rules: a device computes one thing at a time, and copies beside it. ``F[i,j]`` follows
    ``F[i-1,j]`` and the copy from ``j - 1``; the backward mirrors it, twice as long. All but the
    last micro-batch are recomputed as soon as the device is free, while the gradient is copied.
    """
    devices = [torch.device("cuda", j) for j in range(n)]
    events: list[Event] = []
    free = [0.0] * n

    def run(kind: str, i: int, j: int, start: float, seconds: float) -> float:
        events.append(Event(kind, i, j, devices[j], start, start + seconds))
        free[j] = start + seconds
        return free[j]

    def arrive(i: int, origin: int, j: int, start: float) -> float:
        events.append(
            Event("copy", i, j, devices[j], start, start + copy, 0, devices[origin], origin)
        )
        return start + copy

    for i in range(m):
        there = 0.0
        for j in range(n):
            there = arrive(i, j - 1, j, there) if j else there
            there = run("forward", i, j, max(there, free[j]), task)
    free = [max(free)] * n  # the loss needs all outputs
    for i in reversed(range(m)):
        there = max(free)
        for j in reversed(range(n)):
            there = free[j] if j == n - 1 else arrive(i, j + 1, j, there)
            if i < m - 1:
                run("recomputation", i, j, free[j], task)
            there = run("backward", i, j, max(there, free[j]), 2 * task)
    return Timeline(events, devices)


def pictures(steps: int) -> dict[str, dict[str, Timeline]]:
    """Returns the timelines of each file, by title."""
    even, uneven = [0.08, 0.08, 0.08], [0.06, 0.12, 0.06]
    return {
        "front": {
            "pipe.forward_backward(x, target=y, loss_fn=loss_fn)": recorded(
                even, 6, steps=steps, schedule="1f1b"
            )
        },
        "step": {
            "Four micro-batches, three partitions: forward and backward": recorded(
                even, 4, steps=steps
            )
        },
        "checkpoint": {
            f"checkpoint={mode!r}": recorded(even, 4, steps=steps, checkpoint=mode)
            for mode in ("never", "except_last")
        },
        "balance": {
            title: recorded(seconds, 4, steps=steps, backward=False)
            for title, seconds in {
                "Three equal partitions": even,
                "The same work, half of it in the second": uneven,
            }.items()
        },
        "chunks": {
            f"chunks={m}": recorded(even, m, steps=steps, backward=False) for m in (1, 4, 16)
        },
        "schedules": {
            "loss.backward()": recorded(even, 6, steps=steps),
            "schedule='gpipe'": recorded(even, 6, steps=steps, schedule="gpipe"),
            "schedule='1f1b'": recorded(even, 6, steps=steps, schedule="1f1b"),
        },
        "zero_bubble": {
            f"schedule={name!r}": apart(name, [f"cpu:{k}" for k in workers], steps=steps)
            for name, workers in {
                "1f1b": (0, 1, 2), "zb-h1": (0, 1, 2), "zb-h2": (0, 1, 2),
                "zb-v": (0, 1, 2, 2, 1, 0),
            }.items()
        },
        "fine_tuning": {
            "One batch, as with a device_map": fine_tuned(even, [ROWS], steps=steps),
            "Six ready micro-batches, in a step": fine_tuned(even, [6, 4, 7, 5, 6, 4], steps=steps),
        },
        "gpus": {"Three GPUs: the schedule, drawn and not measured": drawn(4, 3, 0.020, 0.008)},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--out", type=Path, default=PICTURES, help="where to (docs/pictures)")
    parser.add_argument("--steps", type=int, default=5, help="the fastest of so many is shown (5)")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, timelines in pictures(arguments.steps).items():
        save_picture(timelines, arguments.out / f"{name}.svg", width=6)  # legible at 400 pixels


if __name__ == "__main__":
    main()
