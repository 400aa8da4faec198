"""Measures what each part of the runtime is worth: the paper's section 4.1, U-Net (5, 64).

The parts are switched on one after the other, *clock only* first: four pipes with these switches
run in turn. ``--picture`` draws the four timelines, as the paper's figure does. With ``--devices
cuda:0,cpu`` one GPU is enough to see copies beside computation.

*Clock only* and *+ fork/join* differ in the paper but not here. Autograd picks the ready node
created last. A worker of pipert creates the nodes of its micro-batches one after the other, and a
recomputation creates none that run backward, so the last micro-batch comes first anyway. Fork and
join turn an order that happens to hold into one that is guaranteed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median

import torch
from _ablation import PARTS, only
from _experiments import options, parse, write
from _measure import Row, report, take_turns
from _models import UNET
from _paper import ABLATION
from _steps import by_autograd, one_peak, one_step

from pipert import Pipe, Timeline
from pipert.balance import balance_by_time
from pipert.observe.timeline import save_picture

__all__ = ["main"]

CPU_ROWS, CPU_CHUNKS = 1, 4  # samples of a micro-batch, and micro-batches


def papers() -> None:
    """Prints what each part is worth in the paper."""
    table = [
        Row((each.name, f"{each.throughput:.1f}", f"{each.speed_up:.2f}",
             f"{each.utilisation:.0%}", f"{each.memory:.1f}"))
        for each in ABLATION
    ]  # fmt: skip
    columns = ("parts", "samples/s", "speed-up", "utilisation", "GiB")
    report("U-Net (5, 64), four devices, batch 128, m=8: the paper's", columns, table)


def here(arguments: argparse.Namespace) -> tuple[dict[str, dict[str, float]], dict[str, Timeline]]:
    """Measures and prints what each part is worth on the local devices; records a step of each."""
    devices, scale = arguments.devices, arguments.scale
    batch, chunks = ABLATION[0].batch, ABLATION[0].chunks
    if devices[0].type == "cpu":
        batch, chunks = CPU_ROWS * CPU_CHUNKS, CPU_CHUNKS
    x = torch.rand(batch, *UNET.image(scale)).to(devices[0])
    module = UNET.at_width(scale)
    balance = list(ABLATION[0].balance)
    if len(devices) != len(balance):
        balance = balance_by_time(len(devices), module, x[: batch // chunks].cpu())
    with ExitStack() as stack:
        pipes = {}
        for name in PARTS:
            pipe = Pipe(deepcopy(module), balance, devices=devices, chunks=chunks)
            pipes[name] = stack.enter_context(pipe)
        step = partial(_step_of, pipes, x, devices)
        times = take_turns(step, tuple(pipes), repeats=arguments.steps, warm_up=1)
        timelines: dict[str, Timeline] = {}
        figures: dict[str, dict[str, float]] = {}
        for name, pipe in pipes.items():
            with only(pipe, PARTS[name]):
                with pipe.record() as timelines[name]:
                    one_step(by_autograd(pipe), x, devices)
                peak = one_peak(by_autograd(pipe), x, devices)
            figures[name] = {
                "throughput": batch / median(times[name]),
                "utilisation": 1 - timelines[name].report().bubble,
                "peak": peak,
            }
    base = figures["clock only"]["throughput"]
    table = []
    for name, figure in figures.items():
        cells = [name, f"{figure['throughput']:.2f}", f"{figure['throughput'] / base:.2f}"]
        cells += [f"{figure['utilisation']:.0%}", f"{figure['peak'] / 2**20:.0f}"]
        table.append(Row(tuple(cells)))
    columns = ("parts", "samples/s", "speed-up", "utilisation", "MiB")
    where = ", ".join(map(str, devices))
    report(f"U-Net (5, 64), m={chunks}: measured on {where}", columns, table)
    if len(set(devices)) > 1:  # there are copies; the report says how much computation hides them
        print(timelines["+ direct skips"].report(), end="\n\n")
    return figures, timelines


def _step_of(
    pipes: dict[str, Pipe], x: torch.Tensor, devices: Sequence[torch.device], name: str
) -> float:
    with only(pipes[name], PARTS[name]):
        return one_step(by_autograd(pipes[name]), x, devices)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both tables, and draws the timelines."""
    parser = options(__doc__)
    parser.add_argument("--picture", type=Path, help="where to draw the timelines; .png or .svg")
    arguments = parse(parser, argv)
    papers()
    figures, timelines = here(arguments)
    if arguments.picture is not None:
        save_picture(timelines, arguments.picture)
        print(f"wrote {arguments.picture}")
    write(arguments, measured=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
