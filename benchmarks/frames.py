"""Counts the Python calls of an action, and the frames between a worker's loop and a user's layer.

The pipe has three partitions of one ``nn.Linear`` each, on CPU workers, and three micro-batches. A
profile hook counts every call of a Python function, including torch's, from the moment a worker has
received a task's input until it does so for the next; the middle action of each kind, ``[1,1]``, is
shown. The frames are those between the worker's loop and the call of the layer. The second table
counts the calls of pipert's functions in a whole mini-batch, on all threads. Nothing here is timed.
The fewest calls of ten mini-batches count, because the first mini-batch creates what later ones
reuse, and an action that has to wait for its input gives up its turn.

A recomputation on a thread of autograd is not a task and is not counted.
"""

from __future__ import annotations

import argparse
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipert
from pipert import Pipe, pipeline
from pipert.stage.stage import Task
from pipert.workers.worker import work

__all__ = ["Counted", "count", "main"]

N = M = 3
REPEATS = 10
BARS = {("call", "never", "F"): (34, 7), ("call", "always", "F"): (65, 7)}
"""The most Python calls and frames permitted."""

PACKAGE = str(Path(pipert.__file__).parent)
MINI_BATCHES = {"call": (345, 41), "1f1b": (690, 46), "any model": (1950, 65)}
"""The most calls and files permitted in a mini-batch of three micro-batches in two partitions: in a
call, in a step without recomputation, in a step of any model in which all is recomputed."""


class Counted(NamedTuple):
    """The Python calls, source files and frames of one action."""

    calls: int
    files: int
    frames: int | None
    """``None`` if it calls no layer."""


class _Thread:
    """The profile function of one worker thread, and its counts."""

    def __init__(self, found: dict[str, Counted]) -> None:
        self._found = found
        self._action = ""
        self._files: set[str] = set()
        self._calls = 0
        self._frames: int | None = None

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code, stack = frame.f_code, _above(frame)
        if work.__code__ not in stack:
            return
        if code is Task.receive.__code__:
            if self._action:  # the one before is over
                counted = Counted(self._calls, len(self._files), self._frames)
                before = self._found.get(self._action, counted)
                self._found[self._action] = min(before, counted, key=lambda one: one.calls)
            self._action = str(frame.f_locals["self"].what[1])
            self._calls, self._frames = 0, None
            self._files.clear()
        self._calls += 1
        self._files.add(code.co_filename)
        if code is nn.Module.__call__.__code__ and self._frames is None:
            self._frames = stack.index(work.__code__)


def _above(frame: FrameType) -> list[Any]:
    stack, above = [], frame.f_back
    while above is not None:
        stack.append(above.f_code)
        above = above.f_back
    return stack


def count(way: str, checkpoint: str) -> dict[str, Counted]:
    """Counts the calls of each kind of action.

    Args:
        way: ``'call'``, or the schedule of a step.
        checkpoint: the checkpoint mode, as for ``Pipe``.
    """
    found: dict[str, Counted] = {}

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        thread = _Thread(found)
        sys.setprofile(thread.see)

    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(N)])
    x = torch.randn(M, 4)
    pipe = Pipe(layers, [1] * N, devices=["cpu"] * N, chunks=M, checkpoint=checkpoint)
    threading.setprofile(hook)
    try:
        with pipe:
            for _ in range(REPEATS):
                if way == "call":
                    pipe(x)
                else:
                    pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss, schedule=way)
    finally:
        threading.setprofile(None)
    return {name[0]: counted for name, counted in found.items() if name.endswith("[1,1]")}


class TwoLinears(nn.Module):
    """A model with a ``forward`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def count_mini_batch(way: str) -> tuple[int, int]:
    """Counts the calls of pipert's functions in a mini-batch, on all threads, and their files.

    Args:
        way: a key of ``MINI_BATCHES``.
    """
    seen: list[tuple[str, str]] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    x, settings = torch.randn(M, 4), dict[str, Any](devices=["cpu"] * 2, chunks=M)
    if way == "any model":
        make: Any = partial(pipeline, TwoLinears(), cuts=["second"], checkpoint="always")
    else:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        make = partial(Pipe, layers, [1, 1], checkpoint="never")
    threading.setprofile(see)
    fewest: list[tuple[str, str]] | None = None
    try:
        with make(**settings) as pipe:
            for _ in range(REPEATS):
                seen.clear()
                sys.setprofile(see)
                if way == "call":
                    pipe(x)
                else:
                    pipe.forward_backward(x, target=x, loss_fn=nn.functional.mse_loss)
                sys.setprofile(None)
                if fewest is None or len(seen) < len(fewest):
                    fewest = list(seen)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert fewest is not None
    return len(fewest), len({file for file, _ in fewest})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    missed = []
    print(f"{'way':6} {'checkpoint':10} {'action':6} {'calls':>5} {'files':>5} {'frames':>6}")
    for way in ("call", "1f1b"):
        for checkpoint in ("never", "always"):
            for kind, (calls, files, frames) in sorted(count(way, checkpoint).items()):
                print(f"{way:6} {checkpoint:10} {kind:6} {calls:5} {files:5} {frames or '-':>6}")
                most = BARS.get((way, checkpoint, kind))
                if most and (calls > most[0] or (frames or 0) > most[1]):
                    missed.append(f"{kind} of a {way}, {checkpoint}: at most {most[0]} calls and "
                                  f"{most[1]} frames")  # fmt: skip
    print(f"\n{'mini-batch':10} {'calls':>5} {'files':>5}")
    for way, (most_calls, most_files) in MINI_BATCHES.items():
        calls, files = count_mini_batch(way)
        print(f"{way:10} {calls:5} {files:5}")
        if calls > most_calls or files > most_files:
            missed.append(f"{way}: at most {most_calls} calls in {most_files} files")
    print("Every bar held." if not missed else "Missed:\n" + "\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
