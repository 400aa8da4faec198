"""Compares steps under ``'zb-h1'`` and ``'1f1b'`` on two CPU workers, in turn.

**Steps.** Linears of 256 columns and 2,048 rows, convolutions with 32 channels of 32x32, 64 rows,
and transformer blocks, ``never`` recomputed. Each worker has one thread, so what it gains is the
wait that it fills.

**Host cost.** A stage of 100 Linears of different widths, one micro-batch: how long ``B`` and ``W``
take together, of ``B`` under ``'1f1b'``, by recordings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from _measure import Row, report, rows, start, take_turns, verdict
from torch import Tensor, nn
from torch.nn.functional import mse_loss as loss

from pipert import Pipe

__all__ = ["main"]

SCHEDULES = ("1f1b", "zb-h1")
WORST = 1.01  # the highest permitted ratio where no other is given


def linears() -> tuple[nn.Sequential, Tensor]:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers), torch.randn(2048, 256)


def convolutions() -> tuple[nn.Sequential, Tensor]:
    layers = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(64, 32, 32, 32)


def blocks() -> tuple[nn.Sequential, Tensor]:
    layers = [
        nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers), torch.randn(16, 64, 128)


BARS: dict[Callable[[], tuple[nn.Sequential, Tensor]], dict[int, float]] = {
    linears: {2: 0.85, 4: 0.92},
    convolutions: {2: 0.93, 4: 0.96},
    blocks: {},
}


def step(make: Callable[[], tuple[nn.Sequential, Tensor]], m: int, repeats: int) -> list[Row]:
    """Measures a step of each schedule, and their ratio."""
    torch.manual_seed(0)
    layers, x = make()
    target = torch.zeros_like(x)

    def seconds(schedule: str) -> float:
        begin = time.perf_counter()
        pipe.forward_backward(x, target=target, loss_fn=loss, schedule=schedule)
        return time.perf_counter() - begin

    half = len(layers) // 2
    with Pipe(layers, [half, half], devices=["cpu"] * 2, chunks=m, checkpoint="never") as pipe:
        samples = take_turns(seconds, SCHEDULES, repeats=repeats)
    plain, apart = (median(samples[name]) for name in SCHEDULES)
    bar = BARS[make].get(m, WORST)
    return [_row(make.__name__, f"m={m}", plain, apart, bar)]


def host_cost(width: int, repeats: int) -> list[Row]:
    """Measures ``B``, and ``B`` with ``W``, of a stage of 100 Linears."""
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(100)])
    x = torch.randn(width, width)
    target = torch.zeros_like(x)

    def seconds(schedule: str) -> float:
        with pipe.record() as timeline:
            pipe.forward_backward(x, target=target, loss_fn=loss, schedule=schedule)
        kinds = ("backward", "weight gradient")
        return sum(event.seconds for event in timeline.events if event.kind in kinds)

    with Pipe(layers, [100], devices=["cpu"], chunks=1, checkpoint="never") as pipe:
        samples = take_turns(seconds, SCHEDULES, repeats=repeats)
    plain, apart = (median(samples[name]) for name in SCHEDULES)
    return [_row("100 Linears", f"width {width}", plain, apart, 1.15)]


def _row(what: str, case: str, plain: float, apart: float, bar: float) -> Row:
    ratio = apart / plain
    missed = (f"{what}, {case}: {ratio:.3f}, the bar is {bar:.2f}",) if ratio > bar else ()
    times = [f"{1e3 * seconds:.2f}" for seconds in (plain, apart)]
    return Row((what, case, *times, f"{ratio:.3f}", f"{bar:.2f}"), missed)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if ``--check`` was given and a bar was missed."""
    arguments = start(argv, __doc__)
    repeats = 5 if arguments.short else 31
    steps, hosts = list[Row](), list[Row]()
    for make in BARS:
        for m in (2, 4, 8):
            steps += rows(partial(step, make, m, repeats), check=arguments.check)
    for width in (16, 128, 512):
        hosts += rows(partial(host_cost, width, repeats), check=arguments.check)
    columns = ("layers", "case", "1f1b", "zb-h1", "ratio", "bar")
    missed = report("A step on two CPU workers, milliseconds", columns, steps)
    missed += report("B, and W where there is one, milliseconds", columns, hosts)
    return verdict(missed, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
