"""Measures the cost of a recording: the same step with and without ``pipe.record()``, in turn.

A small GPT in two partitions on two CPU workers: forward, loss and backward. A recording times each
task, and hooks the first and the last node of each task of the backward.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from torch import Tensor, nn

from pipert import Pipe

__all__ = ["main"]

BAR = 1.03  # the highest permitted ratio to the step without a recording
WIDTH, LENGTH, BATCH, CHUNKS = 128, 64, 16, 4


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        y: Tensor = x + self.feed(self.norms[1](x))
        return y


def cost(checkpoint: str, repeats: int, slack: float) -> list[Row]:
    """Measures a step with and without a recording, and their ratio."""
    blocks = [Block() for _ in range(4)]
    x = torch.randn(BATCH, LENGTH, WIDTH)
    events = 0

    def step(name: str) -> float:
        nonlocal events
        begin = time.perf_counter()
        with pipe.record() if name == "recorded" else nullcontext() as timeline:
            pipe(x).square().mean().backward()
        seconds = time.perf_counter() - begin
        if timeline is not None:
            events = len(timeline.events)
        return seconds

    devices = ["cpu", "cpu"]
    model = nn.Sequential(*blocks)
    with Pipe(model, [2, 2], devices=devices, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
        samples = take_turns(step, ("plain", "recorded"), repeats=repeats, warm_up=4)
    plain, recorded = (median(samples[name]) for name in ("plain", "recorded"))
    ratio = recorded / plain
    bar = 1 + (BAR - 1) * slack
    missed = (f"{checkpoint}: {ratio:.3f}, the bar is {bar:.2f}",) if ratio > bar else ()
    milliseconds = (f"{1e3 * seconds:.2f}" for seconds in (plain, recorded))
    return [Row((checkpoint, str(events), *milliseconds, f"{ratio:.3f}", f"{bar:.2f}"), missed)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    table: list[Row] = []
    for checkpoint in ("never", "except_last", "always"):
        repeats = 15 if arguments.short else 101

        def measure(checkpoint: str = checkpoint, repeats: int = repeats) -> list[Row]:
            return cost(checkpoint, repeats, arguments.slack)

        table += rows(measure, check=arguments.check)
    columns = ("checkpoint", "events", "plain", "recorded", "ratio", "bar")
    missed = report("A step of a small GPT, milliseconds", columns, table)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
